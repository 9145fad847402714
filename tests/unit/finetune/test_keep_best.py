"""The trainer exports what is evaluated: which versions, on which ranks; results come early, late or never."""

import errno
import json
import logging
import os
import shutil

import pytest
import torch
from fakes.short_sample import evaluation_result
from transformers import AutoModelForCausalLM

from pipelinerl.config.finetune import LoraConfig
from pipelinerl.config.schedule import EvaluationSchedule
from pipelinerl.finetune.backends.base import PlainBackend
from pipelinerl.finetune.best_model import BestKeeper, BestModel
from pipelinerl.finetune.lora import add_adapters
from pipelinerl.finetune.model_export import ModelExporter
from pipelinerl.finetune.ranks import Ranks


@pytest.fixture
def tokenizer_folder(tmp_path, kit):
    return kit.tokenizer(tmp_path / "tokenizer")


class Evaluated:
    """A trainer next to an actor that answers with `values` by due version, as soon as the trainer asks for results."""

    def __init__(self, kit, trainer, values, known):
        self.trainer, self.reader = trainer, kit.reader(known)
        self.root, self.exporter, self.publisher = trainer.root, trainer.exporter, trainer.publisher
        trainer.best.results = self.reader
        deliver = self.publisher.publish

        def publish(version, *others):
            report = deliver(version, *others)
            if version in values:
                self.publish(evaluation_result(version, values[version], incarnation=trainer.context.incarnation))
            return report

        self.publisher.publish = publish

    def publish(self, record):
        self.reader._records.append(record)

    @property
    def results(self):
        return list(self.reader._records)

    def go(self):
        self.trainer.go()
        return self

    @property
    def best(self):
        file = self.root / "best" / "evaluation.json"
        return json.loads(file.read_text()) if file.exists() else None

    def left(self):
        folder = self.root / "evaluated"
        return sorted(int(path.name) for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def evaluated(kit, start):
    def make(values, folder="run", every=1, known=(), **settings):
        settings = {"keep_best": "success_rate", "eval_every_n_versions": every, **settings}
        return Evaluated(kit, start(folder, **settings), values, known)

    return make


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_the_best_version_is_kept_as_it_was_sent(evaluated, tmp_path):
    ended = evaluated({0: 0.1, 1: 0.2, 2: 0.6, 3: 0.3}).go()
    assert (ended.best["version"], ended.best["value"], ended.best["metric"]) == (2, 0.6, "success_rate")
    # The last version waits for the final evaluation.
    assert ended.left() == [2, 4]
    whole = evaluated({}, "again", also_save_steps=[2]).go()
    kept, saved = weights_of(tmp_path / "run" / "finetune" / "best"), weights_of(whole.root / "intermediate" / "2")
    for name, tensor in saved.items():
        assert torch.equal(kept[name], tensor), name
    assert (tmp_path / "run" / "finetune" / "best" / "tokenizer.json").exists()


def test_the_final_evaluation_is_settled_by_whoever_lives_to_see_it(evaluated, tmp_path):
    ended = evaluated({0: 0.1, 2: 0.6}, every=2).go()
    assert ended.left() == [2, 4]
    launcher = BestModel(tmp_path / "run" / "finetune", "success_rate", 0.5)
    launcher.settle([*ended.results, evaluation_result(4, 0.7, is_final=True)])
    launcher.drop_rest()
    assert (ended.best["version"], ended.left()) == (4, [4])
    final, current = tmp_path / "run" / "finetune" / "best", tmp_path / "run" / "finetune" / "current"
    assert os.path.samefile(final / "model.safetensors", current / "model.safetensors"), "no second copy on the disk"


def test_a_version_that_is_saved_anyway_is_not_written_twice(evaluated, tmp_path):
    ended = evaluated({0: 0.1, 2: 0.6}, every=2, save_checkpoint_steps=2).go()
    saved = tmp_path / "run" / "finetune" / "intermediate" / "2"
    assert os.path.samefile(saved / "model.safetensors", tmp_path / "run" / "finetune" / "best" / "model.safetensors")
    assert not (saved / "evaluation.json").exists() and ended.best["version"] == 2


def test_updates_and_evaluations_at_different_distances(evaluated):
    """Updates behind steps 2 and 4, evaluations every 1: the one due at 2 measures 2; nothing else is sent."""
    ended = evaluated({0: 0.1, 2: 0.6}, weight_update_interval=2).go()
    assert (ended.best["version"], ended.left()) == (2, [2, 4])


def test_a_run_whose_first_evaluation_failed_altogether_makes_it_at_its_next_evaluated(evaluated):
    failed = evaluation_result(0, None, num_failed=4, mean_reward=None)
    run = evaluated({0: 0.3}, known=[failed], incarnation=1).go()
    assert run.best["version"] == 0


def test_a_result_that_was_there_before_its_export_counts(evaluated):
    """A long save between update and export: the evaluation is over when the version is exported."""
    ended = evaluated({0: 0.1, 1: 0.9}, save_checkpoint_steps=1, interrupt_train_steps=2)
    ended.go()
    assert ended.best["version"] == 1


def test_a_resumed_run_goes_on_with_what_was_best(evaluated, tmp_path):
    first = evaluated({0: 0.1, 1: 0.7}, interrupt_train_steps=2).go()
    known = first.results
    assert (first.best["version"], first.left()) == (1, [1, 2])
    # The final evaluation of the first start was cut off; the second one begins at 2, with it due again.
    second = evaluated({2: 0.5, 3: 0.4}, known=known, incarnation=1).go()
    assert (second.best["version"], second.left()) == (1, [1, 4])
    third = evaluated({}, "new", known=[], incarnation=0).go()
    assert third.best is None


def test_a_crash_between_export_and_result_is_made_up_for(evaluated):
    first = evaluated({0: 0.1}, interrupt_train_steps=2).go()
    assert first.left() == [0, 1, 2], "the best one, the one that was being measured, the last one"
    known = first.results
    # The result of version 2 came after the trainer's end, and the launcher was killed before it took it.
    known.append(evaluation_result(2, 0.8, is_final=True))
    second = evaluated({3: 0.2}, known=known, incarnation=1).go()
    assert (second.best["version"], second.left()) == (2, [2, 4])


@pytest.mark.parametrize("rust", [False, True], ids=["system", "tokenizer"])
def test_o1_a_full_disk_costs_the_candidate_and_not_the_run(evaluated, monkeypatch, caplog, rust):
    run = evaluated({0: 0.1, 1: 0.2, 2: 0.9, 3: 0.15})
    write = run.exporter.write

    def full(final, policy, source, files=None):
        write(final, policy, source, files)
        if final.parent.name == "evaluated" and final.name == "2":
            shutil.move(final, final.with_name(f".partial-{final.name}"))
            raise Exception("No space left on device (os error 28)") if rust else OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(run.exporter, "write", full)
    with caplog.at_level(logging.WARNING):
        run.go()
    assert run.trainer.state.step == 4 and run.best["version"] == 1
    assert not (run.root / "evaluated" / ".partial-2").exists()
    assert "finetune.keep_best=null" in caplog.text and "No space left" in caplog.text


def test_a_fault_that_is_not_the_disks_is_not_hidden(evaluated, monkeypatch):
    run = evaluated({})
    monkeypatch.setattr(run.exporter, "write", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.go()


def test_other_ranks_take_part_exactly_when_the_first_one_says_so(kit, tmp_path, monkeypatch):
    """Rank 1 of 2: it is told by broadcasts, reads no results and writes nothing."""
    told = iter([-1, 1, 0, 1])  # no evaluation so far; export 0; not 2; export 4
    monkeypatch.setattr(Ranks, "broadcast", lambda self, value: next(told))
    written = []

    class Exporter:
        def write(self, final, policy, source, files):
            written.append(int(final.name))

    best = BestModel(tmp_path, "success_rate", 0.5)
    backend = PlainBackend(kit.policy(), kit.config(), Ranks())
    keeper = BestKeeper(Ranks(1, 2), EvaluationSchedule(2, 10), backend, Exporter(), best, None, 0)
    keeper.begin(0)
    for version in range(5):
        keeper.offer(version)
    keeper.offer_final(5, tmp_path)
    assert written == [0, 4] and list(told) == [] and list(tmp_path.iterdir()) == []


def test_a_lora_run_keeps_its_adapter(kit, tmp_path, tokenizer_folder):
    policy = kit.policy()
    add_adapters(policy, LoraConfig(enabled=True, r=4), "base")
    exporter = ModelExporter(tmp_path, str(tokenizer_folder), Ranks())
    backend = PlainBackend(policy, kit.config(), Ranks())
    best = BestModel(tmp_path, "mean_reward", 0.5)
    keeper = BestKeeper(Ranks(), EvaluationSchedule(1), backend, exporter, best, kit.reader([]), 0)
    keeper.begin(0)
    keeper.offer(0)
    assert (tmp_path / "evaluated" / "0" / "adapter" / "adapter_model.safetensors").exists()
