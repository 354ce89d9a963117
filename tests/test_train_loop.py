"""The training loop: determinism, checkpoints, resuming, records and configs."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.errors import HoldfastError, InputError, UnknownNameError
from holdfast.layers import manifold_parameters
from holdfast.models import config, load, named_configs
from holdfast.storage import read_metadata, read_tensors, write_tensors
from holdfast.train import DataConfig, TrainConfig, TrainingConfig, read_training, train
from holdfast.train import place as place_module
from holdfast.train.losses import LOSSES, CrossEntropy, Emma
from holdfast.train.place import find_place
from holdfast.train.slopes import GradientSlope

SMALL = {"width": 16, "depth": 1, "neck": 16}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Some digits as a file: 32 that come with the package, and noisy copies."""
    from holdfast.data.digits import demo_digits

    found, path = demo_digits(), tmp_path_factory.mktemp("data") / "digits.safetensors"
    torch.manual_seed(0)
    images = torch.cat([(found.images + 0.1 * k * torch.rand_like(found.images)).clamp(0, 1) for k in range(6)])
    save_file({"inputs": images, "labels": found.labels.repeat(6)}, path)
    return str(path)


def setup(data: str, *losses, **options) -> TrainingConfig:
    chosen = {
        "epochs": 3,
        "batch": 32,
        "lr": 0.01,
        "manifold_lr": 0.03,
        "losses": losses or (Emma(radius=0.2, temperature=0.1),),
    }
    return TrainingConfig(
        "test",
        replace(config("digits-smooth"), **SMALL),
        DataConfig(data, validation=32, augment=("shift",)),
        TrainConfig(**chosen | options),
    )


def weights(run):
    return {name: t.clone() for name, t in run.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_learns_and_keeps_orthogonal_maps_so(digits, tmp_path):
    run = train(setup(digits, epochs=12, evaluate_every=6), tmp_path, device="cpu")
    assert run.finished
    assert [epoch.epoch for epoch in run.history] == [6, 12]
    assert run.history[-1].clean > 0.8
    assert 0 < run.history[-1].certified <= run.history[-1].clean
    for w in manifold_parameters(run.model):
        tall = w if w.shape[0] >= w.shape[1] else w.mT
        assert torch.allclose(tall.mT @ tall, torch.eye(tall.shape[1]), atol=1e-5)


def test_the_seed_decides_and_other_random_numbers_do_not(digits, tmp_path):
    first = weights(train(setup(digits), tmp_path / "a", device="cpu"))
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    assert same(first, weights(train(setup(digits), tmp_path / "b", device="cpu")))
    assert torch.equal(before, torch.random.get_rng_state())
    assert not same(first, weights(train(setup(digits).with_seed(1), tmp_path / "c", device="cpu")))


@pytest.mark.parametrize("stop_at", [4, 5])
def test_interrupted_and_resumed_bit_for_bit(digits, tmp_path, monkeypatch, stop_at):
    monkeypatch.setattr("holdfast.train.loop._TELL_EVERY", 1)
    whole = train(setup(digits), tmp_path / "whole", device="cpu")

    def stop(now):
        if now.step == stop_at:
            raise KeyboardInterrupt

    part = train(setup(digits), tmp_path / "part", device="cpu", progress=stop)
    assert not part.finished
    assert not (tmp_path / "part" / "model.safetensors").exists()
    assert json.loads((tmp_path / "part" / "run.json").read_text())["step"] == stop_at
    rest = train(setup(digits), tmp_path / "part", device="cpu")
    assert rest.finished
    assert same(weights(whole), weights(rest))
    assert [replace(each, seconds=0) for each in whole.history] == [replace(each, seconds=0) for each in rest.history]


TRAVELLING = {"slow weights": {"lookahead": 2}, "compact": {"lookahead": 2, "compact_every": 2}}


@pytest.mark.parametrize("kind", TRAVELLING)
def test_a_training_that_runs_out_of_time_goes_on_bit_for_bit(digits, tmp_path, kind):
    chosen = setup(digits, batch=80, evaluate_every=3, **TRAVELLING[kind])
    whole = train(chosen, tmp_path / "whole", device="cpu")
    stops = []
    for _ in range(6):
        run = train(chosen, tmp_path / "part", device="cpu", seconds=0, shard_size=8_000)
        assert len(list((tmp_path / "part").glob("checkpoint-*.safetensors"))) > 1
        stops.append(run.step)
        if run.finished:
            break
        assert not run.interrupted
    # A compact state is that after epochs 2 and 3, of two steps each.
    assert stops == ([4, 6] if kind == "compact" else [1, 2, 3, 4, 5, 6])
    assert same(weights(whole), weights(run))
    assert same(weights(run), load(tmp_path / "part" / "model.safetensors").state_dict())


def test_an_interrupted_compact_training_goes_on_bit_for_bit(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.train.loop._TELL_EVERY", 1)
    chosen = setup(digits, epochs=4, compact_every=2, lookahead=3)
    whole = train(chosen, tmp_path / "whole", device="cpu")

    def stop(now):
        if now.step == 13:
            raise KeyboardInterrupt

    part = train(chosen, tmp_path / "part", device="cpu", checkpoint_seconds=0, progress=stop)
    assert (part.interrupted, part.step) == (True, 10)
    assert same(weights(whole), weights(train(chosen, tmp_path / "part", device="cpu")))


def test_compact_checkpoints_have_a_quarter_of_the_size(digits, tmp_path):
    wide = replace(setup(digits, epochs=1, manifold_lr=0.01), model=replace(config("digits-patches"), width=64))
    train(wide, tmp_path / "whole", device="cpu")
    compact = replace(wide, train=replace(wide.train, compact_every=1))
    run = train(compact, tmp_path / "compact", device="cpu")
    whole, small = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "compact"))
    orthogonal = sum(p.numel() for p in manifold_parameters(run.model))
    assert sum(t.nbytes for t in whole.values()) - sum(t.nbytes for t in small.values()) >= 6 * orthogonal
    for w in manifold_parameters(run.model):
        assert torch.equal(w, w.half().float())


def test_slow_weights_are_the_mean_on_the_manifold():
    from holdfast.train.optimisers import Lookahead

    torch.manual_seed(0)
    turned, free = (torch.nn.Parameter(torch.linalg.qr(torch.randn(6, 4)).Q) for _ in range(2))
    first, start = turned.detach().clone(), free.detach().clone()
    slow = Lookahead([turned], [free], share=0.25)
    with torch.no_grad():
        turned.copy_(torch.linalg.qr(first + 0.1 * torch.randn(6, 4)).Q * torch.linalg.qr(first).R.diagonal().sign())
        free.add_(1.0)
    u, _, vh = torch.linalg.svd(0.75 * first + 0.25 * turned.detach(), full_matrices=False)
    slow.step()
    assert torch.allclose(turned, u @ vh, atol=1e-6)
    assert torch.allclose(free, start + 0.25)
    slow.step()  # the fast weights are where the slow ones are
    assert torch.allclose(free, start + 0.25)


def test_an_interrupt_within_a_step_leaves_the_last_checkpoint(digits, tmp_path, monkeypatch):
    from holdfast.layers import ManifoldStep

    whole = train(setup(digits), tmp_path / "whole", device="cpu")
    step, calls = ManifoldStep.step, []

    def interrupted(self, closure=None):
        calls.append(1)
        if len(calls) == 7:  # AdamW has stepped already
            raise KeyboardInterrupt
        return step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(ManifoldStep, "step", interrupted)
        assert not train(setup(digits), tmp_path / "part", device="cpu", checkpoint_seconds=0).finished
    assert json.loads((tmp_path / "part" / "run.json").read_text())["step"] == 6
    assert same(weights(whole), weights(train(setup(digits), tmp_path / "part", device="cpu")))


def test_killed_and_resumed_bit_for_bit(tmp_path):
    pytest.importorskip("sklearn")
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[model]\ninput="image"\nclasses=10\nchannels=1\nside=8\npatch=4\nwidth=16\ndepth=1\nheads=2\nneck=16\n'
        '[data]\nname="digits"\nvalidation=100\naugment=["shift"]\n[train]\nepochs=1\nbatch=256\n[[train.losses]]\nkind="emma"\n'
    )
    killed = (
        "import os, signal, torch, holdfast.train.loop as loop\n"
        "torch.set_num_threads(1)\n"
        "loop._TELL_EVERY = 1\n"
        "def kill(now):\n    if now.step == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"loop.train({str(toml)!r}, {str(tmp_path / 'part')!r}, device='cpu', checkpoint_seconds=0, progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", killed], timeout=120, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    rest, whole = (train(toml, tmp_path / name, device="cpu") for name in ("part", "whole"))
    assert same(weights(rest), weights(whole))
    assert rest.test == whole.test
    assert set(rest.test) >= {"clean", "certified", "content_off", "total_variation", "score_norm"}


def test_a_finished_training_is_not_repeated(digits, tmp_path):
    first = train(setup(digits), tmp_path, device="cpu")
    told = []
    again = train(setup(digits), tmp_path, device="cpu", progress=told.append)
    assert not told
    assert same(weights(first), weights(again))


def test_another_training_in_the_folder_is_refused(digits, tmp_path):
    train(setup(digits, epochs=1), tmp_path, device="cpu")
    with pytest.raises(InputError, match=r"belongs to another training: lr was 0.01 and is 0.02.*--no-resume"):
        train(setup(digits, epochs=1, lr=0.02), tmp_path, device="cpu")
    assert train(setup(digits, epochs=1, lr=0.02), tmp_path, device="cpu", resume=False).finished
    (tmp_path / "checkpoint.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(InputError, match="not the checkpoint of a training"):
        train(setup(digits, epochs=1), tmp_path, device="cpu")


def test_a_checkpoint_from_before_a_key_was_there_is_gone_on_with(digits, tmp_path):
    first = train(setup(digits, epochs=1), tmp_path, device="cpu")
    path = tmp_path / "checkpoint.safetensors"
    content = json.loads(read_metadata(path)["holdfast_training"])
    del content["identity"]["train"]["lookahead"]
    content["identity"]["model"]["centring"] = False  # a key that is gone
    del content["identity"]["train"]["losses"][0]["gamma"]
    write_tensors(path, read_tensors(path), {"holdfast_training": json.dumps(content)})
    told = []
    again = train(setup(digits, epochs=1), tmp_path, device="cpu", progress=told.append)
    assert not told
    assert same(weights(first), weights(again))
    with pytest.raises(InputError, match="belongs to another training: lookahead was 0 and is 2"):
        train(setup(digits, epochs=1, lookahead=2), tmp_path, device="cpu")


def test_a_saved_model_is_trained_further(digits, tmp_path):
    first = train(setup(digits), tmp_path / "first")
    still = setup(digits, lr=1e-12, manifold_lr=1e-12).with_start(tmp_path / "first" / "model.safetensors")
    further = train(still, tmp_path / "further")
    for name, weight in weights(first).items():
        assert torch.allclose(weights(further)[name], weight, atol=1e-6)
    wider = replace(still, model=replace(still.model, width=32))
    with pytest.raises(InputError, match="of another shape"):
        train(wider, tmp_path / "wider")


def test_the_files_of_a_run(digits, tmp_path):
    run = train(setup(digits, epochs=1), tmp_path, device="cpu", command="holdfast train x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.safetensors",
        "model.safetensors",
        "run.json",
    ]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"] == "holdfast train x"
    assert record["versions"]["torch"] == torch.__version__
    assert record["config"]["train"]["losses"][0]["slope"] == {"kind": "gains", "radius": 0.0, "sample": 0}
    assert record["step"] == record["steps"] == 5
    assert record["measured_on"] == "32 inputs of the training split, kept apart"
    assert same(weights(run), load(tmp_path / "model.safetensors").state_dict())
    assert load_file(tmp_path / "checkpoint.safetensors")["manifold.0.momentum"].ndim == 2


def test_the_loss_that_is_not_finite_ends_the_training(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(CrossEntropy, "__call__", lambda self, run: run.logits.sum() * torch.nan)
    with pytest.raises(HoldfastError, match="the loss of epoch 1 is nan; lower lr"):
        train(setup(digits, CrossEntropy()), tmp_path, device="cpu")


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_every_loss_trains(digits, tmp_path, kind):
    cold = hasattr(LOSSES[kind], "temperature")
    terms = (LOSSES[kind](temperature=0.1),) if cold else (CrossEntropy(temperature=0.1), LOSSES[kind]())
    run = train(setup(digits, *terms, epochs=6, evaluate_every=6), tmp_path, device="cpu")
    assert run.history[-1].clean > 0.4


def test_bf16_and_slopes_by_differentiation(digits, tmp_path):
    slope = GradientSlope(radius=0.2)
    loss = Emma(slope=slope, temperature=0.1)
    run = train(setup(digits, loss, precision="bf16", slope=slope, epochs=6), tmp_path, device="cpu")
    assert run.history[-1].clean > 0.4
    assert next(iter(run.model.parameters())).dtype == torch.float32


def test_words_train(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(2, 20, (128, 6))
    save_file({"inputs": ids, "labels": (ids == 5).any(1).long()}, tmp_path / "words.safetensors")
    sizes = {"tokens": 6, "vocabulary": 20, "width": 8, "heads": 2, "depth": 1}
    chosen = TrainingConfig(
        "words",
        replace(config("sst2-smooth"), **sizes),
        DataConfig(str(tmp_path / "words.safetensors")),
        TrainConfig(epochs=2, batch=32, losses=(Emma(slope=GradientSlope()),)),
    )
    run = train(chosen, tmp_path / "out", device="cpu")
    assert run.finished
    assert "those trained on" in (tmp_path / "out" / "run.json").read_text()
    with pytest.raises(InputError, match=r"expected ids \(b, 7\)"):
        train(replace(chosen, model=replace(chosen.model, tokens=7)), tmp_path / "other", device="cpu")


def test_accelerate_gives_the_place_and_torch_does_without_it(digits, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    assert find_place("cpu").count == 1
    first = train(setup(digits, epochs=1), tmp_path / "a")
    monkeypatch.setattr(place_module, "find_spec", lambda name: None)
    second = train(setup(digits, epochs=1), tmp_path / "b")
    if not torch.cuda.is_available():
        assert same(weights(first), weights(second))


@pytest.mark.slow
@pytest.mark.parametrize("slope", ["gains", "margin-gradient"])
def test_a_compiled_training(digits, tmp_path, slope):
    from holdfast.train.slopes import SLOPES

    loss = Emma(slope=SLOPES[slope]())
    plain = train(setup(digits, loss, epochs=1), tmp_path / "plain", device="cpu")
    fast = train(setup(digits, loss, epochs=1, compile="default"), tmp_path / "fast", device="cpu")
    assert fast.history[0].loss == pytest.approx(plain.history[0].loss, rel=1e-3)


def test_a_recorded_training(digits, tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = train(setup(digits, epochs=2), tmp_path / "plain", device=device)
    recorded = train(setup(digits, epochs=2, compile="graph"), tmp_path / "recorded", device=device)
    assert recorded.history[-1].loss == pytest.approx(plain.history[-1].loss, rel=1e-3 if device == "cuda" else 0)


# -- configs


def test_every_shipped_config_describes_a_training():
    shipped = named_configs()
    families = {name.split()[0]: name for name in shipped}  # the last of every grid
    for name in families.values():
        assert read_training(name).model == shipped[name]


def test_rates():
    c = TrainConfig(epochs=1, warmup=0.1)
    assert c.rate(0.05) == pytest.approx(0.5)
    assert c.rate(0.1) == pytest.approx(1.0)
    assert c.rate(0.55) == pytest.approx(0.5)
    assert c.rate(1.0) == pytest.approx(0.0)
    assert replace(c, schedule="linear").rate(0.325) == pytest.approx(0.75)
    assert replace(c, schedule="constant").rate(1.0) == 1


HEAD = '[model]\ninput="image"\nclasses=10\nwidth=16\ndepth=1\nheads=2\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nname="cifar10"\n[train]\nepoch=3', r"key of \[train\] in .*'epoch': did you mean 'epochs'"),
        ('[data]\nname="cifar10"\nvalidate=3\n[train]\nepochs=3', "'validate': did you mean 'validation'"),
        ('[data]\nname="cifar10"\n[trian]\nepochs=3', r"table of .*'trian': did you mean 'train'"),
        ('[data]\nname="cifar10"\n', r"has no \[train\]"),
        ('[data]\nname="cifar10"\n[train]\n', r"\[train\] in .* lacks epochs"),
        ('[data]\nname="cifar10"\n[train]\nepochs=0', "epochs of .train. is 0; expected a positive number"),
        ('[data]\nname="cifar10"\n[train]\nepochs=-1', "epochs of .* is -1; expected a number that is not negative"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1.5', "epochs of .* is 1.5; expected int"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nlr="a/b"', "lr of .* is 'a/b'; expected float"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nwarmup=1.0', "warmup of .train. is 1.0"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nlookahead_share=0', "lookahead_share of .train. is 0.0"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nlosses=[]', "losses of .train. is empty"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nlosses=3', "losses of .* is 3; expected a list"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nschedule="cosin"', "'cosin': did you mean 'cosine'"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nlosses=["ema"]', "unknown loss 'ema': did you mean 'emma'"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nslope="gain"', "unknown slope 'gain': did you mean 'gains'"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\nslope={a=1}', "has no kind; expected one of gains, jacobian"),
        (
            '[data]\nname="cifar10"\n[train]\nepochs=1\n[[train.losses]]\nkind="pgd"\nstep=3',
            "'step': did you mean 'steps'",
        ),
        (
            '[data]\nname="cifar10"\n[train]\nepochs=1\n[[train.losses]]\nkind="pgd"\nsteps=0',
            "steps is 0; expected at least 1",
        ),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\n[[train.losses]]\nkind="jasmin"\nk=1', "k is 1"),
        ('[data]\nname="cifar10"\n[train]\nepochs=1\n[[train.losses]]\nkind="emma"\ntemperature=0', "temperature is 0"),
        ('[data]\nname="cifar10"\naugment=["flp"]\n[train]\nepochs=1', "augmentation 'flp': did you mean 'flip'"),
        ('[data]\nname="sst2"\n[train]\nepochs=1', "classes of .model. is 10; 'sst2' has 2"),
        ("[data\n", "cannot be read as TOML"),
        ("data=3\n[train]\nepochs=1", "expected a table"),
    ],
)
def test_bad_configs(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text + "\n" + HEAD if text.startswith("data=") else HEAD + text)
    with pytest.raises(InputError, match=message):
        read_training(path)


def test_configs_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="no file"):
        read_training(tmp_path / "run.toml")
    with pytest.raises(UnknownNameError, match="did you mean 'digits-smooth'"):
        read_training("digits-smoth")


def test_a_fraction_is_a_number(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        HEAD + '[data]\nname="cifar10"\n[train]\nepochs=1\nradius="36/255"\n[[train.losses]]\nkind="emma"\nradius=1'
    )
    found = read_training(path).train
    assert found.radius == 36 / 255
    assert found.losses == (Emma(radius=1.0),)


def test_data_that_does_not_fit(digits, tmp_path):
    chosen = setup(digits)
    with pytest.raises(InputError, match=r"inputs of shape \(8, 8\); .model. takes \(1, 16, 16\)"):
        train(replace(chosen, model=replace(chosen.model, side=16)), tmp_path, device="cpu")
    with pytest.raises(InputError, match=r"validation of .data. is 500; .* has 192 training inputs"):
        train(replace(chosen, data=replace(chosen.data, validation=500)), tmp_path, device="cpu")
    with pytest.raises(InputError, match="expected none for a model of words"):
        replace(chosen, model=replace(config("sst2-smooth"), classes=10))
