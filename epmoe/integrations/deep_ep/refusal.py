"""How a rank that cannot take part in a call tells the other ranks."""

import contextlib

from ... import _C
from ...a2a.base import propagate_layer_error
from ...comm.device import status_of, stream_of


def refuse(world, error, steps):
    """Tell the other ranks that this one cannot take part in a call, then raise the error.

    steps: The operations of the call: (layer, communication buffer, operation).  A layer of None is one that
    the others create in this call.
    """
    # On a CPU the others raise in the first operation.  On a GPU they have launched the next ones, too.
    for layer, buffer, op in steps:
        with contextlib.suppress(Exception):
            if layer is None:
                propagate_layer_error(world, None, error)
                break
            _C.layer_propagate_error(layer._c, buffer, op, status_of(error), stream_of(layer.device))
            if layer.device.type == "cpu":
                break
    raise error


@contextlib.contextmanager
def before_creation(world):
    """A block of a constructor, before the other ranks and this one create a layer.

    The block makes no collective call.  Where it raises on one rank, the others raise PeerError in the
    creation.
    """
    try:
        yield
    except Exception as error:
        propagate_layer_error(world, None, error)
        raise
