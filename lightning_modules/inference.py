"""The weights that pictures are made with while a module trains."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lightning_modules.edit_module import EditModule
from lightning_modules.optimization import averaged_weights


@contextmanager
def inference_weights(module: EditModule) -> Iterator[None]:
    """Inside, in evaluation mode and with the weights as a loader will have them, for pictures and validation."""
    module.eval()
    with ExitStack() as stack:
        stack.enter_context(averaged_weights(module))
        stack.enter_context(module.execution.for_inference())
        if module.device_mesh is None:  # those that are split over processes stay as they train
            stack.enter_context(module.trained.in_dtype(module.base.dtype))
        stack.callback(module.train)
        yield
