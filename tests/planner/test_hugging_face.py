"""Hugging Face's Trainer inside a budget: what does not go together is refused in words, and nothing is left behind."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.integrations.accelerate import fit_in_memory as fit_in_accelerate  # noqa: E402
from hyper_parallel.integrations.hugging_face import MemoryPlanCallback, fit_in_memory  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


# Newer versions have another name, and warn of this one.
_WORD = "activation" if hasattr(hf.PreTrainedModel, "activation_checkpointing_enable") else "gradient"


class Stopping(hf.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *args: Any, **given: Any) -> None:
        raise ZeroDivisionError


class InOrder(hf.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def of_length(length: int) -> dict[str, Any]:
    tokens = torch.arange(length) % models.VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def trainer(folder: Path, *callbacks: Any, kind: Any = hf.Trainer, data: Any = None, **options: Any) -> Any:
    args = hf.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, logging_strategy="no", **{"max_steps": 1, **options},
    )  # fmt: skip
    data = data or [of_length(models.LENGTH)] * 4
    return kind(models.make("llama"), args, train_dataset=data, callbacks=list(callbacks))


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_is_named_with_how_to_switch_it_off(kwargs: Any) -> None:
    model = models.make("llama")
    getattr(model, f"{_WORD}_checkpointing_enable")(kwargs)
    with pytest.raises(ValueError, match=rf"model\.{_WORD}_checkpointing_disable\(\)"):
        hp.plan_memory(model, models.batch("llama"), progress=False)
    getattr(model, f"{_WORD}_checkpointing_disable")()
    plan = hp.plan_memory(model, models.batch("llama"), progress=False)
    getattr(model, f"{_WORD}_checkpointing_enable")(kwargs)
    with pytest.raises(ValueError, match=rf"model\.{_WORD}_checkpointing_disable\(\)"):
        plan.apply(model)
    assert hp.wrappers(model) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({f"{_WORD}_checkpointing": True}, f"{_WORD}_checkpointing_disable"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "Compile the blocks"),
    ],
)
def test_options_that_a_plan_cannot_go_with_are_refused_with_what_to_do(
    options: Any, said: str, tmp_path: Path
) -> None:
    trained = trainer(tmp_path, **options)
    fit_in_memory(trained, "60%")
    with pytest.raises(ValueError, match=said):
        trained.train()
    assert hp.wrappers(trained.model) == []


def test_the_state_of_any_optimizer_is_counted_and_a_second_call_replaces_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = trainer(tmp_path, optim="adafactor")
    first = fit_in_memory(trained, "1%")
    callback = fit_in_memory(trained, "60%", reserve="1MiB")
    trained.train()
    assert first.plan is None
    assert callback.plan is not None
    said = capsys.readouterr().err
    assert said.count("hyper_parallel: planned to fit in") == 1
    words = r"predicted peak .* \(measured .*\), predicted step \d+ ms \(measured \d+ ms\), predicted \d\.\d\d of the plain step's time \(measured \d"
    assert re.search(words, said)
    assert "made anew" not in said
    assert callback.plan.stats(trained.model) == callback.stats == {}
    held = trained.optimizer.optimizer if hasattr(trained.optimizer, "optimizer") else trained.optimizer
    state_bytes = sum(each.nbytes for own in held.state.values() for each in own.values() if torch.is_tensor(each))
    parameter_bytes = sum(each.numel() * each.element_size() for each in trained.model.parameters())
    batch_bytes = 2 * 2 * models.LENGTH * 8
    buffers = sum(each.nbytes for each in trained.model.buffers())
    assert callback.plan.base_bytes == 2 * parameter_bytes + state_bytes + batch_bytes + buffers + 2**20


WRONG = [
    ({"on_oom": "replam"}, "`on_oom` has no such choice"),
    ({"budget": 60}, 'Did you mean "60%"'),
    ({"loss_fn": 3}, "`loss_fn` gives the loss"),
    ({"reserve": -1}, "reserve is negative"),
    ({"keeps_output": "no"}, "`keeps_output` is yes or no"),
    ({"verify": None}, "`verify` is yes or no"),
    ({"progress": "bar"}, "`progress` says whether"),
    ({"longest": 3}, "longest"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_a_wrong_option_is_told_when_the_callback_is_made(options: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        MemoryPlanCallback(**options)
    trained = trainer(tmp_path)
    with pytest.raises((TypeError, ValueError), match=said):
        fit_in_memory(trained, **options)
    assert "train" not in vars(trained)


def test_a_batch_that_is_given_is_planned_with_in_place_of_the_first(tmp_path: Path) -> None:
    lengths = (48, 48, 64, 64)
    trained = trainer(tmp_path, kind=InOrder, max_steps=2, data=[of_length(n) for n in lengths])
    callback = fit_in_memory(
        trained, "60%", batch={name: torch.stack([each] * 2) for name, each in of_length(64).items()}
    )
    trained.train()
    assert callback.plan is not None
    assert callback.plan.profile.identity.batch == {"input_ids": "int64[2, 64]", "labels": "int64[2, 64]"}
    assert callback.stats == {}


def test_a_wrong_choice_is_told_before_anything_is_planned() -> None:
    with pytest.raises(ValueError, match="`on_oom` has no such choice"):
        fit_in_accelerate(None, None, None, on_oom="replam")


def test_an_exception_in_training_takes_the_plan_off(tmp_path: Path) -> None:
    stopping = Stopping()
    trained = trainer(tmp_path, stopping)
    callback = fit_in_memory(trained, "60%")
    with pytest.raises(ZeroDivisionError):
        trained.train()
    assert callback.plan is not None
    assert hp.wrappers(trained.model) == []
    trained.remove_callback(stopping)
    trained.train()
    assert hp.wrappers(trained.model) == []


def test_a_callback_by_itself_plans_again_after_an_exception(tmp_path: Path) -> None:
    stopping, callback = Stopping(), MemoryPlanCallback("60%")
    trained = trainer(tmp_path, callback, stopping)
    with pytest.raises(ZeroDivisionError):
        trained.train()
    assert hp.wrappers(trained.model) != []
    trained.remove_callback(stopping)
    trained.train()
    assert hp.wrappers(trained.model) == []


def test_a_model_that_moves_its_own_state_trains_as_without_a_plan(tmp_path: Path) -> None:
    found = []
    for budget in (None, "60%"):
        trained = trainer(tmp_path, seed=3)
        model, seen = trained.model, []
        model.model.embed_tokens.max_norm = 1.0
        model.model.register_forward_hook(lambda *_, seen=seen: seen.append(len(seen)))
        losses: list[float] = []
        trained.training_step = functools.partial(_noting, trained.training_step, losses)
        if budget is not None:
            fit_in_memory(trained, budget)
        trained.train()
        weights = [each.detach().clone() for each in model.parameters()]
        found.append((losses, seen, weights))
    (losses, seen, weights), planned = found
    assert losses == planned[0]
    assert seen == planned[1] == [0]
    assert all(map(torch.equal, weights, planned[2]))


@pytest.mark.parametrize("budget", ["60%", "1TiB"], ids=["planned", "empty"])
def test_a_larger_batch_is_told_before_it_trains_and_a_smaller_one_is_not(budget: str, tmp_path: Path) -> None:
    trained = trainer(tmp_path, kind=InOrder, max_steps=4, data=[of_length(n) for n in (64, 64, 48, 48, 96, 96)])
    losses: list[float] = []
    trained.training_step = functools.partial(_noting, trained.training_step, losses)
    callback = fit_in_memory(trained, budget)
    with pytest.raises(
        RuntimeError, match=r"at most int64\[2, 64\], got int64\[2, 96\]; argument `input_ids`(?s:.*)`batch="
    ):
        trained.train()
    assert len(losses) == 2
    assert callback.stats == {"batches larger than planned": 1}
    assert hp.wrappers(trained.model) == []


@pytest.mark.parametrize("budget", ["60%", "1TiB"], ids=["planned", "empty"])
def test_accelerate_tells_of_a_larger_batch_or_plans_for_it(budget: str) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(models.make("llama"))
    inner = accelerator.unwrap_model(model)
    short, longer = ({name: tokens[None] for name, tokens in of_length(n).items()} for n in (64, 72))
    plan = fit_in_accelerate(accelerator, model, short, budget, progress=False)
    accelerator.backward(model(**short).loss)
    with pytest.raises(RuntimeError, match=r"at most int64\[1, 64\], got int64\[1, 72\]; argument `input_ids`"):
        model(**longer)
    plan.remove(inner)
    accelerator.backward(model(**longer).loss)
    plan = fit_in_accelerate(accelerator, model, short, "90%", on_oom="replan", progress=False)
    accelerator.backward(model(**longer).loss)
    assert plan.stats(inner) == {"plans made anew": 1}
    plan.remove(inner)


def _noting(step: Any, losses: list[float], *args: Any, **kwargs: Any) -> Any:
    loss = step(*args, **kwargs)
    losses.append(float(loss))
    return loss
