"""The entry point of epmoe.integrations.sglang for SGLang; without EPMOE_SGLANG=1 it does nothing."""

import os


def register():
    """Let SGLang's MoE layers use epmoe if EPMOE_SGLANG is 1.  SGLang calls this in each of its processes.

    Raises:
        SystemExit: When EPMOE_SGLANG is neither 0, 1 nor empty, or this SGLang is not the one for which epmoe
            was written.  SGLang logs other exceptions of a plugin and continues, and would so use DeepEP.

    Examples:
        >>> from epmoe.integrations.sglang_plugin import register
        >>> register()  # EPMOE_SGLANG is not set
    """
    wanted = os.environ.get("EPMOE_SGLANG", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"EPMOE_SGLANG={wanted}: wanted 1, for epmoe in SGLang's MoE layers, or 0")
    if wanted == "1":
        try:
            from . import sglang

            sglang.register_hooks()
        except Exception as error:
            raise SystemExit(f"EPMOE_SGLANG=1: {error}") from error
