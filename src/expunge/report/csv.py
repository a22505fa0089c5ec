"""Rows as a spreadsheet reads them: one line a row, all fields, one header."""

from csv import DictReader, DictWriter
from dataclasses import asdict, fields
from pathlib import Path

from expunge.bench.results import MEASURES, NAMES, Results, Row
from expunge.errors import DataError, RequestError

_FIELDS = [part.name for part in fields(Row)]


def write_csv(results: Results, path: str | Path) -> Path:
    """Write all rows; a value that was not measured is an empty field.

    Raises:
        RequestError: the path cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = write_csv(Results("demo", {}, {}, [Row("trained", 0, asr=0.9)], {}), Path(folder) / "rows.csv")
        ...     read_csv(file) == [Row("trained", 0, asr=0.9)]
        True
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("w", encoding="utf-8", newline="") as file:
            lines = DictWriter(file, _FIELDS, lineterminator="\n")
            lines.writeheader()
            lines.writerows(asdict(row) for row in results.rows)
    except OSError as error:
        raise RequestError(f"Cannot write rows to {target}: {error.strerror or error}.") from error
    return target


def read_csv(path: str | Path) -> list[Row]:
    """The rows of a file that `write_csv` wrote.

    Raises:
        DataError: the file cannot be read, or has other columns or values.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            lines = DictReader(file)
            if lines.fieldnames != _FIELDS:
                raise DataError(f"{path} does not have the columns of a results row.")
            return [_row(line) for line in lines]
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read rows from {path}: {error}.") from error


def _row(line: dict[str, str]) -> Row:
    measured = {name: float(line[name]) for name in MEASURES if line[name]}
    said = {name: line[name] or None for name in NAMES}
    return Row(seed=int(line["seed"]), **measured, **said)  # type: ignore[arg-type]
