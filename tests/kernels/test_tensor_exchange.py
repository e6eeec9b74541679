"""What DLPack's exchange says of a tensor is what the tensor says of itself."""

import pytest
import torch
from kvcanary.kernels.capture.tensor_exchange import CPU, TensorExchange

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no exchange of tensors by C functions",
)
BITS = {torch.int64: 64, torch.int32: 32}


@pytest.mark.parametrize("dtype", BITS.keys())
@pytest.mark.parametrize("part", [slice(None), slice(3, 7), slice(0, 9, 2), slice(5, 5)])
def test_a_view_is_the_tensor(dtype: torch.dtype, part: slice) -> None:
    tensor = torch.arange(10).to(dtype)[part]
    seen = TensorExchange().look(tensor)
    assert seen.data + seen.byte_offset == tensor.data_ptr()
    assert seen.device == CPU
    assert (seen.dimensions, seen.kind >> 32) == (1, BITS[dtype] << 8 | 1 << 16)  # signed, one lane
    assert seen.shape[0] == tensor.numel()
    assert tensor.numel() < 2 or seen.strides[0] == tensor.stride(0)


def test_dimensions_are_counted() -> None:
    tensor = torch.zeros(2, 3, 4)
    assert TensorExchange().look(tensor).dimensions == 3


@pytest.mark.parametrize("other", [None, 5, [1, 2]])
def test_anything_else_is_refused(other: object) -> None:
    with pytest.raises(Exception, match=r"."):
        TensorExchange().look(other)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcanary.kernels.capture.tensor_exchange.VERSION", 2)
    with pytest.raises(ValueError, match="version 1, expected 2"):
        TensorExchange()
