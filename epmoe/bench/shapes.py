"""The shapes that are measured, and a smaller one of each for the CPU."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """T tokens per rank, H hidden, I inner, E experts of all ranks, K choices per token."""

    name: str
    tokens: int
    hidden: int
    inner: int
    experts: int
    topk: int

    def small(self):
        """Return a shape for the CPU: 1/128 of the tokens, 1/16 of the width, at most 32 experts."""
        return replace(self, name=self.name + "-small", tokens=max(16, self.tokens // 128),
                       hidden=max(64, self.hidden // 16),
                       inner=max(64, self.inner // 16), experts=min(self.experts, 32))

    def with_tokens(self, tokens):
        return replace(self, tokens=tokens)


SHAPES = {s.name: s for s in (
    Shape("seed", 32768, 1536, 1536, 384, 8),
    Shape("dsv3", 8192, 7168, 2048, 256, 8),
    Shape("qwen3-235b", 8192, 4096, 1536, 128, 8),
    Shape("mixtral", 8192, 4096, 14336, 8, 2),
    Shape("gpt-oss-120b", 8192, 2880, 2880, 128, 4),
    Shape("qwen3-30b", 8192, 2048, 768, 128, 8),
)}
