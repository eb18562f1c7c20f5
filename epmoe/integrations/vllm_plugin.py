"""The entry point through which vLLM finds epmoe.integrations.vllm; without EPMOE_VLLM=1 it does nothing."""

import os


def register():
    """Let vLLM's MoE layers use epmoe if EPMOE_VLLM is 1.  vLLM calls this in each of its processes.

    Raises:
        ValueError: When EPMOE_VLLM is neither 0, 1 nor empty.
        ImportError: As epmoe.integrations.vllm.use.

    Examples:
        >>> from epmoe.integrations.vllm_plugin import register
        >>> register()  # EPMOE_VLLM is not set
    """
    wanted = os.environ.get("EPMOE_VLLM", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"EPMOE_VLLM={wanted}: wanted 1, for epmoe in vLLM's MoE layers, or 0")
    if wanted == "1":
        from . import vllm

        vllm.use()
