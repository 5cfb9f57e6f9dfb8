"""Where an exported model goes, and in which form."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from isotrain.core.contracts.export import FORMS, SUFFIXES, ExportForm
from isotrain.core.errors import IsotrainError, unknown_name
from isotrain.core.system.folders import removed_on_failure

_OF_SAVED_MODEL = "saved_model.pb"


def form_of(target: Path, asked: ExportForm | None) -> ExportForm:
    """The form that is asked for, or that the name of a target says.

    Raises:
        IsotrainError: There is none of that name, or the target is not named as its files are.
    """
    if asked is None:
        found = [form for form in FORMS if SUFFIXES[form] and target.name.endswith(SUFFIXES[form])]
        if not found:
            raise IsotrainError(
                f"export: the name of {target} does not say the form. Give to= (--to): one of"
                f" {', '.join(FORMS)}."
            )
        return found[0]
    if asked not in FORMS:
        raise IsotrainError(f"export: {unknown_name('form', asked, FORMS)}")
    suffixes = SUFFIXES[asked]
    if suffixes and not target.name.endswith(suffixes):
        raise IsotrainError(
            f"export: {asked!r} is written to a file {' or '.join(suffixes)}, received {target}."
        )
    return asked


@contextlib.contextmanager
def atomically_replaced(target: Path) -> Iterator[Path]:
    """Gives a place of the same name beside a target, which takes that place if all went well.

    What was there before is removed after that; a folder only if it is empty or holds a SavedModel. The
    target's own folder is made if need be.

    Raises:
        IsotrainError: The folder cannot be made or written to, or the target is of another kind.
    """
    place = target.resolve()
    if place.is_dir() and any(place.iterdir()) and not (place / _OF_SAVED_MODEL).is_file():
        raise IsotrainError(
            f"export: {target} is a folder with other things than a SavedModel, which would be lost. Choose"
            " another name."
        )
    try:
        with removed_on_failure(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".export-", dir=place.parent) as folder:
                new = Path(folder) / place.name
                yield new
                if place.is_dir() and new.is_dir():
                    place.rename(Path(folder) / "before")
                new.replace(place)
    except OSError as error:
        reason = error.strerror or error  # without the name of a file that nobody has asked for
        raise IsotrainError(
            f"export: {target} cannot be written: {reason}. Choose another place."
        ) from error
