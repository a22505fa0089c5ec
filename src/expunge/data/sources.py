"""Where each dataset's official files come from, where they lie on disk, and what they must hash to."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from expunge.errors import DataError

HOW_TO_GET_IT = "set EXPUNGE_DATA or --data-dir to a folder that holds it, or use --download when online"


@dataclass(frozen=True)
class Source:
    """The files of one dataset.

    Attributes:
        folder: Where the files lie below the data folder.
        checksums: SHA-256 of every file, by file name.
        url: What the file names are appended to or, with `archive`, the tar.gz that holds `folder`.
        archive: SHA-256 of the tar.gz, or None when the files are offered one by one.
    """

    folder: str
    checksums: Mapping[str, str]
    url: str
    archive: str | None = None


BUILT_IN = Source(folder="", checksums={}, url="")
"""For a dataset that comes with a library and needs no files."""

MNIST = Source(
    folder="MNIST/raw",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    checksums={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
)

FASHION_MNIST = Source(
    folder="FashionMNIST/raw",
    # The authors offer plain http only; the checksums make up for it.
    url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    checksums={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
)

CIFAR10 = Source(
    folder="cifar-10-batches-bin",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    archive="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    checksums={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
)


def read_verified(source: Source, data_dir: Path, name: str) -> bytes:
    """Return the bytes of one file of a dataset, once its checksum has been found right.

    Args:
        source: The dataset's files.
        data_dir: The data folder that `source.folder` lies in.
        name: A key of `source.checksums`.

    Raises:
        DataError: When the file is missing, unreadable or not the official one.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> source = Source("toy", {"a.bin": hashlib.sha256(b"abc").hexdigest()}, url="")
        >>> with TemporaryDirectory() as folder:
        ...     (Path(folder) / "toy").mkdir()
        ...     _ = (Path(folder) / "toy" / "a.bin").write_bytes(b"abc")
        ...     read_verified(source, Path(folder), "a.bin")
        b'abc'
    """
    folder = data_dir / source.folder
    try:
        blob = (folder / name).read_bytes()
    except FileNotFoundError:
        raise DataError(f"{name} is not in {folder}: {HOW_TO_GET_IT}.") from None
    except OSError as error:
        raise DataError(f"{name} in {folder} cannot be read ({error.strerror}): {HOW_TO_GET_IT}.") from None
    if hashlib.sha256(blob).hexdigest() != source.checksums[name]:
        raise DataError(
            f"{name} in {folder} is damaged (its SHA-256 is not the official one): "
            "replace it by a good copy, or use --download when online."
        )
    return blob
