"""The names of many samples."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


class Names(Sequence[str]):
    """Texts in one buffer, which take less memory than as many strings.

    Attributes:
        text: all of them in UTF-8.
        starts, ends: of each, its place there.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        self.starts, self.ends = array("q"), array("q")

    def append(self, text: str) -> None:
        """Add one at the end."""
        self.starts.append(len(self.text))
        self.text += text.encode(errors="surrogatepass")
        self.ends.append(len(self.text))

    def take(self, numbers: Sequence[int]) -> "Names":
        """Those with these numbers; the text is shared."""
        chosen, places = Names(), np.asarray(numbers, dtype=np.intp)
        chosen.text = self.text
        chosen.starts, chosen.ends = (array("q", np.array(of)[places].tobytes()) for of in (self.starts, self.ends))
        return chosen

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        return self.text[self.starts[number] : self.ends[number]].decode(errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))
