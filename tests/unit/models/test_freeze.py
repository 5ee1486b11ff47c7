"""`anyrank.freeze`: a part that its parent can neither train, list, save nor change."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.wrapped import Scaled, scaled
from torch import nn

import anyrank
from anyrank.files.content_hash import content_hash
from anyrank.models.dialects.frozen import freeze
from anyrank.models.dialects.frozen.freeze import check_frozen
from anyrank.models.frozen_parts import FrozenInfo, frozen_parts
from anyrank.models.wrappers import plain_class

SOURCE = "weights/vae.ckpt"


class AutoEncoder(nn.Module):
    """Everything that training would change: weights, running statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.decoder = nn.Linear(3, 4)
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("derived", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) * self.scale


class Model(nn.Module):
    """A trainable part before and after the frozen one."""

    def __init__(self, source: Any = None, *, frozen: bool = True) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.vae = AutoEncoder()
        self.after = nn.Linear(3, 2)
        if frozen:
            anyrank.freeze(self.vae, source=source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.vae(self.before(x)))


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def info(module: Any) -> FrozenInfo:
    return module.anyrank_frozen


# -- what it is -----------------------------------------------------------------------------------


def test_the_same_module_comes_back_and_keeps_its_type() -> None:
    vae = AutoEncoder()
    assert anyrank.freeze(vae) is vae
    assert isinstance(vae, AutoEncoder)
    assert type(vae) is AutoEncoder
    assert plain_class(vae) is AutoEncoder


def test_it_is_freed_with_its_last_reference() -> None:
    vae = anyrank.freeze(AutoEncoder())
    reference = weakref.ref(vae.decoder.weight)
    gc.disable()
    try:
        del vae
        assert reference() is None
    finally:
        gc.enable()


def test_eval_survives_train_of_itself_and_of_the_parent() -> None:
    model = Model()
    for train in (model.train, model.vae.train):
        train()
        assert not any(part.training for part in model.vae.modules())
    assert model.after.training


def test_gradients_stay_off_and_flow_through() -> None:
    model = Model()
    model.requires_grad_(True)
    model.vae.requires_grad_(True)
    assert not any(parameter.requires_grad for parameter in model.vae.parameters())
    model.train()(torch.randn(5, 4)).sum().backward()
    assert all(p.grad is None for p in model.vae.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_training_the_parent_changes_nothing_of_it() -> None:
    model = Model().train()
    before = values(model.vae)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    assert same(values(model.vae), before)
    check_frozen(model.vae)


def test_a_parent_does_not_list_it_and_the_part_itself_does() -> None:
    model = Model()
    listed = [model.named_parameters(), model.named_buffers(), model.named_modules()]
    assert not [name for names in listed for name, _ in names if name.startswith("vae")]
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == [
        "",
        "before",
        "after",
    ]
    plain = AutoEncoder()
    for ask in (nn.Module.named_parameters, nn.Module.named_buffers, nn.Module.named_modules):
        assert [name for name, _ in ask(model.vae)] == [name for name, _ in ask(plain)]
        assert [n for n, _ in ask(model.vae, prefix="x")] == [n for n, _ in ask(plain, prefix="x")]
    assert dict(model.named_children())["vae"] is model.vae
    assert model.get_submodule("vae.decoder") is model.vae.decoder


def test_the_slice_of_a_frozen_container_is_an_ordinary_module() -> None:
    container = anyrank.freeze(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(container[:1]) is nn.Sequential
    assert container[:1][0] is container[0]


def test_freezing_again_keeps_the_source_or_adds_one() -> None:
    vae = anyrank.freeze(AutoEncoder())
    assert info(vae).source is None
    anyrank.freeze(vae, source=Path(SOURCE))
    anyrank.freeze(vae)
    assert info(vae).source == SOURCE
    assert info(anyrank.freeze(vae, source=["a", Path("b")])).source == ("a", "b")


def test_a_frozen_part_within_a_frozen_part() -> None:
    model = Model(SOURCE)
    anyrank.freeze(model)
    assert [name for name, _ in frozen_parts(model)] == ["", "vae"]
    assert not model.training
    assert not any(p.requires_grad for p in (*model.parameters(), *model.vae.parameters()))
    assert not [key for key in model.state_dict() if key.startswith("vae")]
    model.load_state_dict(model.state_dict())


# -- moves, casts, copies -------------------------------------------------------------------------


def test_it_moves_and_casts_with_its_parent() -> None:
    model = Model()
    model.double()
    assert {t.dtype for t in (*model.vae.parameters(), model.vae.scale)} == {torch.float64}
    check_frozen(model.vae)
    model.to("meta")
    assert {t.device.type for t in (*model.vae.parameters(), *model.vae.buffers())} == {"meta"}


def test_a_lightning_module_learns_where_it_was_moved() -> None:
    lightning = pytest.importorskip("lightning")
    inner = lightning.LightningModule()
    inner.net = nn.Linear(2, 2)
    vae, parent = lightning.LightningModule(), lightning.LightningModule()
    vae.inner, parent.vae = inner, vae
    anyrank.freeze(vae)
    parent.to("meta", torch.float64)
    assert {m.device.type for m in (parent, vae, inner)} == {"meta"}
    assert {m.dtype for m in (parent, vae, inner)} == {torch.float64}


def test_mixed_dtypes_stay_mixed_when_it_moves() -> None:
    model = Model()
    model.vae.decoder.bfloat16()
    model.to("meta")
    assert {p.dtype for p in model.vae.parameters()} == {torch.float32, torch.bfloat16}


def save_and_load(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, save_and_load, lambda m: pickle.loads(pickle.dumps(m))]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_copy_is_frozen_too(duplicate: Callable[[Any], Any], whole: bool) -> None:
    model = Model(SOURCE)
    copied = duplicate(model).vae if whole else duplicate(model.vae)
    assert copied is not model.vae
    assert type(copied) is type(model.vae)
    assert same(values(copied), values(model.vae))
    assert info(copied) == info(model.vae)
    check_frozen(copied)
    parent = nn.Sequential(copied, nn.Linear(2, 2)).train()
    assert len(list(parent.parameters())) == 2
    assert not copied.training
    assert parent.state_dict().keys() == {"1.weight", "1.bias"}
    parent.load_state_dict(parent.state_dict())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_torchscript_module_is_frozen_within_a_plain_one_only() -> None:
    script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="TorchScript module cannot be frozen"):
        anyrank.freeze(script)
    assert script.weight.requires_grad
    parent = nn.Sequential(anyrank.freeze(nn.Sequential(script), source=SOURCE)).train()
    assert not script.training
    assert not list(parent.parameters())
    assert not parent.state_dict()


def test_a_lightning_copy_drops_its_trainer_as_lightning_wants() -> None:
    lightning = pytest.importorskip("lightning")
    module = anyrank.freeze(lightning.LightningModule())
    module._trainer = object()
    assert copy.deepcopy(module)._trainer is None


def test_compiling_the_parent_changes_no_result() -> None:
    model = Model()
    x = torch.randn(5, 4)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    compiled.train()
    assert not model.vae.training
    assert torch.equal(compiled(x), expected)
    assert not [name for name, _ in compiled.named_parameters() if "vae" in name]


def test_a_compiled_part_can_be_frozen() -> None:
    model = Model(frozen=False)
    model.vae = torch.compile(model.vae, backend="eager")
    x = torch.randn(5, 4)
    anyrank.freeze(model.vae, source=SOURCE)
    model.train()
    assert not any(part.training for part in model.vae.modules())
    assert [name for name, _ in frozen_parts(model)] == ["vae"]
    assert not [name for name, _ in model.named_parameters() if name.startswith("vae")]
    assert not [key for key in model.state_dict() if key.startswith("vae")]
    with torch.no_grad():
        assert torch.equal(model.vae(x), model.vae._orig_mod(x))


def test_a_frozen_transformers_model_works_as_before(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    text = transformers.BertModel(transformers.BertConfig(num_attention_heads=2, **sizes)).eval()
    tokens = torch.arange(6)[None]
    expected = text(tokens, output_hidden_states=True)
    anyrank.freeze(text)
    found = text(tokens, output_hidden_states=True)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    assert len(found.hidden_states) == len(expected.hidden_states) == 3
    text.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert again.config.architectures == ["BertModel"]
    assert same(values(again), values(text))


# -- checkpoints ----------------------------------------------------------------------------------


def test_without_a_source_it_is_saved_and_loaded_with_its_parent() -> None:
    model, other = Model(), Model()
    assert model.state_dict().keys() == Model(frozen=False).state_dict().keys()
    other.load_state_dict(model.state_dict())
    assert same(values(other.vae), values(model.vae))
    check_frozen(other.vae)


def test_with_a_source_it_is_in_no_checkpoint_of_its_parent() -> None:
    model = Model(SOURCE)
    for parent in (model, nn.Sequential(model), torch.compile(model, backend="eager")):
        assert not [key for key in parent.state_dict() if "vae" in key]
    assert len(model.vae.state_dict()) == len(AutoEncoder().state_dict())
    assert [*model.vae.state_dict(prefix="x.")] == [
        f"x.{key}" for key in AutoEncoder().state_dict()
    ]


@pytest.mark.parametrize("assign", [False, True])
def test_a_parent_loads_without_it_and_leaves_it_alone(assign: bool) -> None:
    model, other = Model(SOURCE), Model(SOURCE)
    before, tensors = values(other.vae), [*other.vae.parameters(), *other.vae.buffers()]
    found = other.load_state_dict(model.state_dict(), assign=assign)
    assert found.missing_keys == found.unexpected_keys == []
    assert same(values(other.vae), before)
    assert torch.equal(other.before.weight, model.before.weight)
    now = [*other.vae.parameters(), *other.vae.buffers()]
    assert all(one is two for one, two in zip(tensors, now, strict=True))
    check_frozen(other.vae)


def test_what_else_is_missing_or_unexpected_is_still_told() -> None:
    model = Model(SOURCE)
    state = model.state_dict()
    state["vae.stranger"] = state.pop("after.bias")
    found = model.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["after.bias"], ["vae.stranger"])


def test_an_old_checkpoint_that_holds_equal_values_loads() -> None:
    old = Model(frozen=False)
    model = Model(SOURCE)
    model.vae.load_state_dict(old.vae.state_dict())
    state = {key: tensor.double() for key, tensor in old.state_dict().items()}
    model.load_state_dict(state)
    assert same(values(model.vae), values(old.vae))


def test_nan_equals_itself() -> None:
    model = Model(SOURCE)
    model.vae.load_state_dict({k: torch.full_like(v, 0) for k, v in model.vae.state_dict().items()})
    with torch.no_grad():
        model.vae.scale[0] = float("nan")
    anyrank.freeze(model.vae)
    model.load_state_dict({**model.state_dict(), **model.vae.state_dict(prefix="vae.")})


@pytest.mark.parametrize("change", [lambda t: t + 1, lambda t: t.new_zeros(7), lambda t: t[None]])
def test_an_old_checkpoint_that_differs_is_refused_by_key(change: Callable[..., Any]) -> None:
    model = Model(SOURCE)
    before = values(model.vae)
    key = "vae.encoder.1.running_mean"
    state = {**model.state_dict(), key: change(model.vae.encoder[1].running_mean)}
    with pytest.raises(anyrank.LoadError, match=rf"^{key}: .*{SOURCE}.*Drop the keys vae\.\*"):
        model.load_state_dict(state)
    assert same(values(model.vae), before)


def test_asked_directly_it_loads_other_values() -> None:
    model, other = Model(SOURCE), AutoEncoder()
    model.vae.load_state_dict(other.state_dict())
    assert same(values(model.vae), values(other))
    check_frozen(model.vae)


def test_a_part_on_meta_is_loaded_later() -> None:
    with anyrank.meta():
        model = Model(SOURCE)
    assert info(model.vae).digest is None
    check_frozen(model.vae)
    model.load_state_dict(Model(SOURCE).state_dict(), assign=True)
    assert model.vae.decoder.weight.is_meta
    old = Model(frozen=False)
    model.load_state_dict(old.state_dict(), assign=True)
    assert same(values(model.vae), values(old.vae))


# -- hashes ---------------------------------------------------------------------------------------


def test_the_digest_is_of_names_dtypes_shapes_and_bytes() -> None:
    def digest(change: Callable[[AutoEncoder], object] = lambda vae: None) -> str | None:
        torch.manual_seed(0)
        vae = AutoEncoder()
        change(vae)
        return info(anyrank.freeze(vae)).digest

    plain = digest()
    assert plain == digest()
    assert plain == digest(lambda vae: vae.derived.add_(1))  # not persistent
    changes: list[Callable[[AutoEncoder], object]] = [
        lambda vae: vae.scale.add_(1),
        lambda vae: vae.half(),
        lambda vae: vae.scale.resize_(3, 1),
        lambda vae: setattr(vae, "renamed", vae._modules.pop("decoder")),
        lambda vae: vae.decoder.weight.data[0].neg_(),
    ]
    digests = {plain, *(digest(change) for change in changes)}
    assert len(digests) == 1 + len(changes)


def test_bytes_are_hashed_again_only_where_torch_counted_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(SOURCE)
    hashed: list[torch.Tensor] = []
    monkeypatch.setattr(freeze, "content_hash", lambda t: hashed.append(t) or content_hash(t))
    check_frozen(model.vae)
    assert hashed == []
    model.load_state_dict(model.state_dict())  # writes its own values to the part
    for _ in range(2):
        check_frozen(model.vae)
    assert len(hashed) == len(AutoEncoder().state_dict())


def test_a_changed_tensor_is_named() -> None:
    vae = anyrank.freeze(AutoEncoder())
    check_frozen(vae)
    with torch.no_grad():
        vae.decoder.weight[0, 0] += 1e-3
    with pytest.raises(
        anyrank.CheckpointError, match=r"^decoder.weight: is frozen, and was float32\[4, 3\]"
    ):
        check_frozen(vae)


def test_a_tensor_that_came_or_went_is_named() -> None:
    vae = anyrank.freeze(AutoEncoder())
    vae.register_buffer("late", torch.ones(1))
    with pytest.raises(anyrank.CheckpointError, match=r"^late: .* absent .* float32"):
        check_frozen(vae)
    del vae.late, vae.scale
    with pytest.raises(anyrank.CheckpointError, match=r"^scale: .* float32.* is now absent"):
        check_frozen(vae)


def test_a_parents_load_does_not_hide_a_change() -> None:
    model = Model(SOURCE)
    model.vae.decoder.weight.data.add_(1)
    model.load_state_dict(model.state_dict())
    with pytest.raises(anyrank.CheckpointError):
        check_frozen(model.vae)


def test_a_part_with_a_source_gets_no_initial_values(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    torch.save(weights, tmp_path / "v.pt")
    with anyrank.meta():
        model = nn.ModuleDict({"v": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    anyrank.freeze(model["v"], source=tmp_path / "v.pt")
    with pytest.raises(anyrank.LoadError, match=r"v.weight: belongs to a frozen part .*v\.pt"):
        anyrank.materialize(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    anyrank.load(model["v"], tmp_path / "v.pt")
    anyrank.materialize(model)
    assert torch.equal(model["v"].weight, weights["weight"])


def test_a_part_with_a_source_inside_of_one_without_is_saved_once_and_resumed(
    tmp_path: Path,
) -> None:
    def build() -> Any:
        return nn.ModuleDict({"outer": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})

    model = build()
    torch.save(model["outer"][1].state_dict(), tmp_path / "inner.pt")
    with anyrank.meta():
        other = build()
    for each in (model, other):
        anyrank.freeze(each["outer"][1], source=tmp_path / "inner.pt")
        anyrank.freeze(each["outer"])
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(model)) as ckpts:
        ckpts.save()
    names = sorted(tensor.name for tensor in anyrank.inspect(tmp_path / "run").tensors)
    assert names == ["outer.0.bias", "outer.0.weight"]
    with anyrank.Checkpoints(tmp_path / "run", anyrank.TrainState(other)) as ckpts:
        ckpts.resume("must")
    for place in (0, 1):
        assert torch.equal(other["outer"][place].weight, model["outer"][place].weight)


def test_a_part_with_a_source_inside_of_one_with_a_source_has_its_own_values(
    tmp_path: Path,
) -> None:
    with anyrank.meta():
        parts = {"head": nn.Linear(2, 2), "outer": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))}
    model = nn.ModuleDict(parts)
    outer: Any = model["outer"]
    files: dict[str, Any] = {}
    for name, part in (("inner", outer[1]), ("outer", outer)):
        files[name] = {key: torch.randn(t.shape) for key, t in part.state_dict().items()}
        torch.save(files[name], tmp_path / f"{name}.pt")
        anyrank.freeze(part, source=tmp_path / f"{name}.pt")
    anyrank.load(model, {f"head.{k}": v for k, v in nn.Linear(2, 2).state_dict().items()})
    assert torch.equal(outer[0].weight, files["outer"]["0.weight"])
    assert torch.equal(outer[1].weight, files["inner"]["weight"])


class Strict(Scaled):
    """Implements few operations, as torchao's quantized tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{func} of a {cls.__name__}")
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("kind", ["quantized", "sparse"])
def test_a_part_whose_bytes_are_hidden_freezes_and_a_load_names_it(kind: str) -> None:
    model: Any = nn.ModuleDict({"part": nn.Linear(4, 4, bias=False), "net": nn.Linear(4, 4)})
    if kind == "quantized":
        hidden: Any = scaled(Strict)
        model["part"].weight = nn.Parameter(hidden, requires_grad=False)
    else:
        model["part"].register_buffer("mask", torch.eye(4).to_sparse())
    anyrank.freeze(model["part"])
    assert [name for name, _ in model.named_parameters()] == ["net.weight", "net.bias"]
    weights = {"net.weight": torch.zeros(4, 4), "net.bias": torch.zeros(4)}
    with pytest.raises(anyrank.LoadError, match=r"part\.(weight: is a Strict|mask: is a .*sparse)"):
        anyrank.load(model, weights)
