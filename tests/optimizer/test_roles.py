"""What optimizers ask of a network's parts: Muon for its hidden matrices, all of them for sparse gradients."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drivetrain.config.catalog import content, option_files
from drivetrain.core.errors import UserError
from drivetrain.core.user.code import import_name
from drivetrain.optimizer import muon as muon_options
from drivetrain.optimizer.algorithms.muon import Muon


class Reader(torch.nn.Module):
    """Tokens to logits: an embedding, experts in one parameter, a recurrent layer and a head."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.experts = torch.nn.Embedding(9, 8, sparse=sparse), Experts()
        self.lstm, self.head = torch.nn.LSTM(8, 8, batch_first=True), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(self.experts(self.table(x)))[0])
        return found


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(3, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("noi,bti->bto", self.up, x)


def test_experts_are_updated_matrix_by_matrix() -> None:
    """As if each were the weight of a layer of its own; a stack of (inputs, outputs) has the scale of its transpose."""
    torch.manual_seed(0)
    stack = torch.nn.Parameter(torch.randn(3, 6, 4))
    each = [torch.nn.Parameter(w.clone()) for w in stack.detach()]
    turned = torch.nn.Parameter(stack.detach().mT.contiguous())
    settings: Any = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "scale": "original", "ns_steps": 5}
    settings |= {"normalize": "neurons", "normalize_beta": 0.9, "cautious_decay": True}
    of_stack = Muon([{"params": [stack], "stacked": True}], **settings)
    of_turned = Muon([{"params": [turned], "stacked": True, "transposed": True}], **settings)
    of_each = Muon(each, **settings)
    for _ in range(3):
        stack.grad = torch.randn_like(stack)
        turned.grad = stack.grad.mT.contiguous()
        for p, g in zip(each, stack.grad, strict=True):
            p.grad = g
        for optimizer in (of_stack, of_turned, of_each):
            optimizer.step()
    assert torch.equal(stack, torch.stack(list(each)))
    torch.testing.assert_close(turned, stack.mT, rtol=0.02, atol=0.02)  # the iteration is in 16 bits


def test_muon_says_what_it_updates(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "drivetrain")
    muon, _ = muon_options.Muon().create(Reader()).members  # type: ignore[attr-defined]
    found = {(group["stacked"], name) for group in muon.param_groups for name in group["param_names"]}
    assert found == {(True, "experts.up"), (False, "lstm.weight_ih_l0"), (False, "lstm.weight_hh_l0")}
    assert "Muon: 5 matrices; AdamW: table, head, 3 vectors" in caplog.text


def test_a_phase_without_a_hidden_matrix_is_adamws_alone(make: Any) -> None:
    phases = "phases={body: {parameters: ['layers.*']}, head: {parameters: [head]}}"
    trainer = make("optimizer=muon", "model.hidden=[8,8,8,8]", phases)
    body, head = ([type(m).__name__ for m in phase.members] for phase in trainer.optimizer.members)
    assert (body, head) == (["Muon", "AdamW"], ["AdamW"])
    names = trainer.optimizer.members[0].members[0].param_groups[0]["param_names"]
    assert names == ["layers.1.linear.weight", "layers.2.linear.weight"], "the phase's last layer gives its outputs"


# --- sparse gradients ---


def has_sparse_norm() -> bool:
    """Torch 2.11 has none, so that SAM refuses sparse gradients there."""
    try:
        return bool(torch.linalg.vector_norm(torch.eye(2).to_sparse()) > 0)
    except NotImplementedError:
        return False


TAKE = {"sgd", "adagrad", "lbfgs", *["sam"] * has_sparse_norm()}  # without weight decay


def option(name: str) -> Any:
    cls: Any = import_name(content(option_files()["optimizer"][name])["_target_"])
    return cls(weight_decay=0.0) if name != "lbfgs" else cls()


def stepped(option: Any, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    optimizer = option.create(model)
    for step in range(3):
        x = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(step))

        @torch.enable_grad()
        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            found = model(x).square().mean()
            found.backward()
            return found

        if option.takes_closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()
    yield from model.parameters()


@pytest.mark.parametrize("name", [name for name in sorted(option_files()["optimizer"]) if not name.startswith("apex")])
def test_sparse_gradients_are_taken_or_refused_by_name(name: str) -> None:
    """Where they are taken, the weights are those of dense gradients."""
    torch.manual_seed(0)
    sparse = Reader(sparse=True)
    dense = copy.deepcopy(sparse)
    dense.table.sparse = False
    if name == "sparse_adam":  # it leaves rows alone that are not read
        option(name).create(sparse)
    elif name in TAKE:
        for own, other in zip(stepped(option(name), sparse), stepped(option(name), dense), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(UserError, match=r"table\.weight has sparse gradients.{,300}: set sparse=False in the Embedding"):
            option(name).create(sparse)
    sparse.table.weight.requires_grad_(False)
    option(name).create(sparse)


def test_weight_decay_of_sparse_gradients_is_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer=sgd optimizer.no_weight_decay=\[table.weight\]"):
        import_name("drivetrain.optimizer.torch_optim.Sgd")(weight_decay=0.1).create(Reader(sparse=True))
    import_name("drivetrain.optimizer.torch_optim.Sgd")(weight_decay=0.1, no_weight_decay=["table.weight"]).create(Reader(True))


@pytest.mark.parametrize("resumed", [False, True])
def test_sparse_adam_trains_as_torchs_two_optimizers(resumed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that no update reads stay as they are, with their moments."""
    torch.manual_seed(0)
    ours = Reader(sparse=True)
    theirs = copy.deepcopy(ours)
    made = import_name("drivetrain.optimizer.torch_optim.SparseAdam")(lr=0.01, weight_decay=0.1)
    optimizer = made.create(ours)
    assert "SparseAdam: table.weight; AdamW: the rest" in caplog.text
    rest = [(name, p) for name, p in theirs.named_parameters() if name != "table.weight"]
    decays = [{"params": [p for _, p in rest if (p.ndim > 1) is many], "weight_decay": 0.1 * many} for many in (True, False)]
    plain = (
        torch.optim.SparseAdam([theirs.table.weight], lr=0.01),
        torch.optim.AdamW([group for group in decays if group["params"]], lr=0.01),
    )
    for step in range(4):
        x = torch.randint(0, 5, (4, 5), generator=torch.Generator().manual_seed(step))  # of nine rows
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        optimizer.step()
        for each in plain:
            each.step()
        if resumed and step == 1:
            state, optimizer = copy.deepcopy(optimizer.state_dict()), made.create(ours)
            optimizer.load_state_dict(state)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7, msg=name)


def test_sparse_adam_without_sparse_gradients_says_so(caplog: pytest.LogCaptureFixture) -> None:
    import_name("drivetrain.optimizer.torch_optim.SparseAdam")().create(Reader())
    assert "optimizer=sparse_adam is AdamW alone" in caplog.text


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_complex_weights_are_trained_as_torch_does(name: str) -> None:
    def after(make: Any) -> torch.Tensor:
        model = torch.nn.ParameterList([torch.ones(3, dtype=torch.complex64) * (1 + 2j)])
        optimizer = make(model)
        for _ in range(3):
            optimizer.zero_grad()
            (model[0] - 1j).abs().square().sum().backward()
            optimizer.step()
        return model[0].detach()

    settings = option(name)
    kind = getattr(torch.optim, settings.torch_name)
    expected = after(lambda model: kind(model.parameters(), **settings.arguments()))
    torch.testing.assert_close(after(settings.create), expected)
