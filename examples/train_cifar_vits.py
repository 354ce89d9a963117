"""Trains a standard vision transformer on CIFAR-10 and writes it for `holdfast repro cifar-vit`.

    python examples/train_cifar_vits.py plain plain-2.safetensors --device cuda
    python examples/train_cifar_vits.py pgd pgd-4.safetensors --depth 4 --radius 0.5 --steps 1358 --device cuda
    python examples/train_cifar_vits.py lipschitz lipschitz-2-0.3.safetensors --radius 0.25 --weight 0.3 --steps 4095 \
        --batch 256 --rate 2e-3 --device cuda
    python examples/train_cifar_vits.py jasmin jasmin.safetensors --k 2 --weight 0.1 --patch 4 --width 96 --heads 3 \
        --depth 4 --steps 1541 --device cuda

CIFAR-10 is in the folder that HOLDFAST_DATA names. `--images N` trains and tests on the first N images, to try it.
"""

import argparse
from dataclasses import fields
from pathlib import Path

import holdfast.data
from holdfast.storage import check_output
from holdfast.studies.cifar_training import RADII, CifarTraining, save_network, train_and_measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="plain, pgd, lipschitz, jasmin or spectral")
    parser.add_argument("out", type=Path, help="the file to write")
    for field in fields(CifarTraining):
        if field.name != "recipe":
            parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    parser.add_argument("--images", type=int, help="use only this many")
    parser.add_argument("--device", default="cpu")
    given = vars(parser.parse_args())
    out, images, device = (given.pop(name) for name in ("out", "images", "device"))
    check_output(out)
    setting = CifarTraining(**given)
    train, test = (holdfast.data.load("cifar10", split) for split in ("train", "test"))
    if images is not None:
        train, test = (data.select(range(images)) for data in (train, test))
    model, found = train_and_measure(setting, train, test, device)
    save_network(out, model, found)
    attacked = ", ".join(f"{100 * share:.1f} % at {r:.3g}" for share, r in zip(found.attacked, RADII, strict=True))
    print(f"{100 * found.accuracy:.1f} % right, under PGD {attacked}; {out} after {found.seconds:.0f} s")


if __name__ == "__main__":
    main()
