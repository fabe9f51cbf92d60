"""Parts of zarr-python's metadata that are private, or change, as in 3.1 to 3.3.

The numbers of the index in front of a shard decide what is taken for cut off.
"""

from __future__ import annotations

from typing import Any

from .parts import require

SEEN = "zarr 3.1 to 3.3"


def chunk_key(array: Any, index: tuple[int, ...]) -> str:
    """The file of a chunk, below the array's folder."""
    require(SEEN, array.metadata, "encode_chunk_key")
    return str(array.metadata.encode_chunk_key(index))


def is_plain(array: Any) -> bool:
    """Whether files hold the elements as they are in the memory of most machines."""
    require(SEEN, array.metadata, "zarr_format")
    return (
        array.metadata.zarr_format == 3
        and not (array.shards or array.filters or array.compressors)
        and "big" not in repr(array.serializer)
    )


def first_index_type(array: Any) -> str:
    """The type of the index that shards begin with; empty where they end with it."""
    require(SEEN, array.metadata, "codecs")
    # As the store has it: the attributes are enums in zarr 3.1 and strings in 3.3
    sharding: Any = array.metadata.codecs[0].to_dict()["configuration"]
    if sharding["index_location"] != "start":
        return ""
    endian = sharding["index_codecs"][0]["configuration"]["endian"]
    return f"{'<>'[endian == 'big']}u8"
