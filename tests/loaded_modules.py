import sys
from pathlib import Path

import lightning.pytorch as L


class LoadedModules(L.Callback):
    """Writes down what is imported when training ends."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_train_end(self, trainer, pl_module):
        self.file.write_text("\n".join(sys.modules))
