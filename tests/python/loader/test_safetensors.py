"""Safetensors checkpoints are loaded whole, or refused with the file and tensor at fault."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import PagedRunner, load, make_model, prompt, reference_logits, save
from vllm_lite import ops
from vllm_lite.layers.memory import WeightMemory
from vllm_lite.layers.packed_weight import PackedRows
from vllm_lite.loader.weights import Place, Slot
from vllm_lite.model_config import load_model_config
from vllm_lite.model_files import ModelFiles
from vllm_lite.models import load_model
from vllm_lite.models.llama import LlamaForCausalLM

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def logits_match(reference: Any, files: ModelFiles) -> None:
    tokens = prompt(20)
    logits = PagedRunner(load(files)).run(tokens, [20])
    torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-4, rtol=0)


def edit(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)


def sharded(directory: Path) -> ModelFiles:
    files = save(make_model("llama"), directory, max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return files


def test_shards(tmp_path: Path) -> None:
    logits_match(make_model("llama"), sharded(tmp_path))


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_filled_exactly_once(family: str, tied: bool, tmp_path: Path) -> None:
    """Slots do not overlap, have names of their own and cover every parameter."""
    reference = make_model(family, tie_word_embeddings=tied)
    config = load_model_config(save(reference, tmp_path))
    memory = WeightMemory(torch.float32, torch.device("cpu"))
    slots: list[Slot] = list(LlamaForCausalLM(config, memory, 64).slots())
    assert {slot.name for slot in slots} == {name for name, _ in reference.named_parameters()}
    spans = []  # (memory, first, past the last): bytes of a tensor or rows of a packed weight
    for slot in slots:
        if isinstance(slot.target, PackedRows):
            first, packed = slot.target.first_row, slot.target.weight.packed
            spans.append((packed.data_ptr(), first, first + slot.target.num_rows))
        else:
            assert isinstance(slot.target, torch.Tensor) and slot.target.is_contiguous()
            spans.append((0, slot.target.data_ptr(), slot.target.data_ptr() + slot.target.nbytes))
    spans.sort()
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    config = load_model_config(files)
    calls: list[tuple[int, int]] = []
    load_model(files, config, torch.float32, 64, lambda done, total: calls.append((done, total)))
    total = sum(parameter.nbytes for parameter in make_model("llama").parameters())
    assert calls[-1] == (total, total) and {total} == {last for _, last in calls}
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


@pytest.mark.case("NUM-01")
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """The server used to start with uninitialised weights."""
    files = sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}: the file is missing"):
        load(files)


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_cut_shard_is_named(size: int, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{shard.name}: damaged or cut-off"):
        load(files)


@pytest.mark.case("NUM-01")
def test_an_index_that_names_an_absent_tensor(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"][K_PROJ]
    index["weight_map"]["model.layers.7.ghost.weight"] = shard
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{shard}: has no tensor model\.layers\.7\.ghost"):
        load(files)


def test_a_shard_with_a_tensor_that_the_index_puts_elsewhere(tmp_path: Path) -> None:
    files = sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"].pop(K_PROJ)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{shard}: holds tensor {K_PROJ}"):
        load(files)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_lead_out_of_the_directory(shard: Any, tmp_path: Path) -> None:
    files = sharded(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {K_PROJ: shard}}))
    with pytest.raises(ValueError, match="no file name"):
        load(files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(K_PROJ), f"has no tensor {K_PROJ}"),
        (lambda t: t.update(extra=torch.zeros(1)), "no place for: extra"),
        (lambda t: t.update({K_PROJ: torch.zeros(65, 128)}), r"k_proj.* has shape \[65, 128\].*64"),
        (lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)}), f"{K_PROJ} has dtype I8"),
        (lambda t: t.pop("lm_head.weight"), r"has no tensor lm_head\.weight"),
    ],
    ids=["missing", "surplus", "shape", "dtype", "head"],
)
def test_a_wrong_tensor_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    files = save(make_model("llama"), tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        load(files)
    assert str(tmp_path) in str(error.value)


@pytest.mark.case("NUM-03")
@pytest.mark.parametrize("with_head", [False, True])
def test_a_tied_model_ignores_a_head_in_the_file(with_head: bool, tmp_path: Path) -> None:
    """The file's own lm_head.weight used to be an error, or was used in place of the embedding."""
    reference = make_model("llama", tie_word_embeddings=True)
    files = save(reference, tmp_path)
    if with_head:
        head = {"lm_head.weight": torch.full((131, 128), 7.0)}
        edit(tmp_path, lambda tensors: tensors.update(head))
    logits_match(reference, files)


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    files = save(make_model("llama"), tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(32)}))
    logits_match(make_model("llama"), files)


@pytest.mark.case("SEC-08")
def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return (marker.write_text, ("x",))

    reference = make_model("llama")
    files = save(reference, tmp_path)
    torch.save({"x": Malicious()}, tmp_path / "pytorch_model.bin")
    logits_match(reference, files)  # beside safetensors it is not looked at
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin; loading it could run code"):
        load(files)
    assert not marker.exists()


def test_a_directory_without_weights(tmp_path: Path) -> None:
    files = save(make_model("llama"), tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"holds neither model\.safetensors nor"):
        load(files)


@pytest.mark.case("NUM-11")
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_to_the_asked_dtype(
    saved: torch.dtype, dtype: str, tmp_path: Path
) -> None:
    for tied in (False, True):
        reference = make_model("llama", tie_word_embeddings=tied).to(saved)
        model = load(save(reference, tmp_path / str(tied)), dtype=dtype)
        assert isinstance(model, LlamaForCausalLM)
        parameters = dict(reference.named_parameters())
        assert model.dtype == getattr(torch, dtype)
        for slot in model.slots():
            values = unpacked(slot.target)
            assert values.dtype == model.dtype
            assert torch.equal(values, parameters[slot.name].to(model.dtype)), slot.name


def unpacked(target: torch.Tensor | Place) -> torch.Tensor:
    """A parameter's values."""
    if isinstance(target, torch.Tensor):
        return target
    assert isinstance(target, PackedRows)
    weight = target.weight
    assert weight.format == str(weight.dtype).removeprefix("torch.")
    values = torch.empty(target.shape, dtype=weight.dtype)
    rows = torch.arange(target.first_row, target.first_row + target.num_rows, dtype=torch.int32)
    ops.packed_embedding(values, weight.packed, weight.format, weight.rows, rows)
    return values


@pytest.mark.case("NUM-11")
def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    files = save(make_model("llama"), tmp_path)
    edit(tmp_path, lambda tensors: tensors[K_PROJ].view(-1)[3].fill_(1e5))
    load(files, dtype="bfloat16")
    with pytest.raises(ValueError, match=rf"{K_PROJ} holds values .* float16"):
        load(files, dtype="float16")


@pytest.mark.parametrize("max_model_len", [0, 513])
def test_a_length_beyond_the_model_is_refused(max_model_len: int, tmp_path: Path) -> None:
    files = save(make_model("llama"), tmp_path)
    with pytest.raises(ValueError, match=rf"max_model_len is {max_model_len};.* 1 to 512"):
        load_model(files, load_model_config(files), torch.float32, max_model_len)
