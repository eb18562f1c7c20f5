"""EventHandle and EventOverlap, which programs import from deep_ep.utils or from deep_ep; and the streams."""

import contextlib
import functools
import weakref

import torch

from ...errors import EpError

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the work of the current CUDA stream, for which other streams can wait.

    Without CUDA there is nothing to wait for, and both methods do nothing.

    Examples:
        >>> from epmoe.integrations import deep_ep
        >>> deep_ep.EventHandle().current_stream_wait()
    """

    def __init__(self):
        self._event = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record()

    def current_stream_wait(self):
        """Let the current stream wait until this point is reached.  The host does not wait.

        Examples:
            See EventHandle.
        """
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An EventHandle, or none, with which work is overlapped.

    As a context manager, it lets the current stream wait at the end of the block.

    Args:
        event: An EventHandle, or None: of a call that was not asynchronous, so that there is nothing to wait
            for.
        extra_tensors: Tensors to keep alive as long as this object.

    Examples:
        >>> from epmoe.integrations import deep_ep
        >>> event = deep_ep.EventOverlap(deep_ep.EventHandle())
        >>> with event:
        ...     pass  # work that runs beside the communication
    """

    def __init__(self, event=None, extra_tensors=None):
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait = None
        self._releases = False

    def current_stream_wait(self, release_handle=False):
        """Let the current stream wait for the event, then call the registered hook once.

        Args:
            release_handle: Drop the event afterwards.

        Raises:
            RuntimeError: Without an event: the call that returned this object was not asynchronous.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> deep_ep.Buffer.capture().current_stream_wait()
        """
        if self.event is None:
            raise RuntimeError("there is no event to wait for: make the call with async_finish=True "
                               "(ElasticBuffer: async_with_compute_stream=True), or do not wait")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait):
        """Call a function after the next current_stream_wait.

        Args:
            hook_after_wait: A function without arguments.

        Raises:
            RuntimeError: When there is one already.

        Examples:
            >>> from epmoe.integrations import deep_ep
            >>> event = deep_ep.Buffer.capture()
            >>> event.register_hook_after_wait(lambda: print("done"))
            >>> event.current_stream_wait()
            done
        """
        if self.hook_after_wait is not None:
            raise RuntimeError("this EventOverlap has a hook already")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle=False):
        """Return this object, for `with event(release_handle=True):`."""
        self._releases = release_handle
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if self.event is not None:
            self.current_stream_wait(self._releases)
        self._releases = False


def check_event(name, event):
    """Raise TypeError for what is neither an event nor None."""
    event = getattr(event, "event", event)
    if event is not None and not hasattr(event, "current_stream_wait"):
        raise TypeError(f"{name}: wanted an EventOverlap, an EventHandle or None, got "
                        f"{type(event).__name__}")


def wait_for(event):
    """Let the current stream wait for an EventHandle, or that of an EventOverlap, if there is one."""
    event = getattr(event, "event", event)
    if event is not None:
        event.current_stream_wait()


class Streams:
    """The communication stream of a buffer, and how a call is put on a stream.

    A call that is not asynchronous runs on the current stream: that is what waiting at both its ends amounts
    to.  An asynchronous call runs on the communication stream, after previous_event or after all work of the
    current stream.

    layers: A method that returns the layers of the buffer.
    """

    def __init__(self, device, layers):
        self.device = device
        self._layers = weakref.WeakMethod(layers)  # a cycle with the buffer would keep its memory
        self.comm = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()

    def run(self, fn, inputs, previous_event=None, is_async=False):
        """Call fn() with its work on the right stream.

        inputs: The tensors that the work reads, or None for some.  They must not be freed for other use
        before the work is done, on whatever stream they were made.

        Returns what fn returns (a tuple), and an EventHandle if is_async, else None.
        """
        with torch.no_grad():
            if self.device.type != "cuda":
                return fn(), EventHandle() if is_async else None
            fn = functools.partial(self._launch, fn)
            current = torch.cuda.current_stream(self.device)
            if not is_async:
                wait_for(previous_event)
                _record(inputs, current)
                return fn(), None
            with torch.cuda.stream(self.comm):
                if getattr(previous_event, "event", previous_event) is None:
                    self.comm.wait_stream(current)
                wait_for(previous_event)
                _record(inputs, self.comm)
                result = fn()
                event = EventHandle()
        _record(result, current)
        return result, event

    def _launch(self, fn):
        """Return fn(), which launches the operations of a call, and may create layers, on a GPU.

        If another rank refuses the call, it does so in each operation and creation.  A creation raises that
        at once, and operations before it may have the same error still to come.  It belongs to this call,
        and not to the next one.
        """
        try:
            return fn()
        except EpError:
            for layer in self._layers()():
                with contextlib.suppress(Exception):
                    layer.synchronize()
            raise


def _record(things, stream):
    """Keep the memory of tensors, also those in tuples, until the stream has done its work so far."""
    for t in things:
        if isinstance(t, torch.Tensor):
            t.record_stream(stream)
        elif isinstance(t, (tuple, list)):
            _record(t, stream)
