"""The shapes that are measured, and a smaller one of each for the CPU."""

from dataclasses import dataclass, replace

from epmoe.moe import cost_model


@dataclass(frozen=True)
class Shape(cost_model.Shape):
    """T tokens per rank, H hidden, I inner, E experts of all ranks, K choices per token, and a name.

    skew: the rows of the fullest rank over the mean (routing.py).  None: the routing is uniform.
    """

    name: str
    skew: float | None = None

    @property
    def label(self):
        """The name, with the skew if there is one."""
        return self.name if self.skew is None else f"{self.name}, skew {self.skew:g}"

    def small(self):
        """Return a shape for the CPU: 1/128 of the tokens, 1/16 of the width, at most 32 experts."""
        return replace(self, name=self.name + "-small", tokens=max(16, self.tokens // 128),
                       hidden=max(64, self.hidden // 16),
                       inner=max(64, self.inner // 16), experts=min(self.experts, 32))

    def with_tokens(self, tokens):
        return replace(self, tokens=tokens)


SHAPES = {s.name: s for s in (
    Shape(32768, 1536, 1536, 384, 8, "seed"),
    Shape(8192, 7168, 2048, 256, 8, "dsv3"),
    Shape(8192, 4096, 1536, 128, 8, "qwen3-235b"),
    Shape(8192, 4096, 14336, 8, 2, "mixtral"),
    Shape(8192, 2880, 2880, 128, 4, "gpt-oss-120b"),
    Shape(8192, 2048, 768, 128, 8, "qwen3-30b"),
)}
# Shapes that a bench measures only if it names them, or if --shapes does.
MORE_SHAPES = {s.name: s for s in (
    Shape(8192, 4096, 2048, 256, 6, "v4-flash"),
)}
KNOWN_SHAPES = SHAPES | MORE_SHAPES
