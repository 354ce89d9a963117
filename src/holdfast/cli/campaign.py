"""`campaign`: random layers, and for each a search for a point where a bound is below the truth."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from holdfast.cli.inputs import Json, Out
from holdfast.cli.work import Job, carry_out, emit_json, say_written
from holdfast.testing.campaign import CampaignReport, Subject, examine, subjects


def campaign(
    layers: Annotated[int, typer.Option(min=0, help="Number of random layers.")] = 20,
    pieces: Annotated[int, typer.Option(min=0, help="Number of random pieces of networks.")] = 40,
    networks: Annotated[int, typer.Option(min=0, help="Number of random networks.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first; number i has seed + i.")] = 0,
    seconds: Annotated[float | None, typer.Option(min=0, help="Start nothing new after this time.")] = None,
    demo: Annotated[bool, typer.Option(help="Begin with the layers of the demo model.")] = True,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Attack every bound, and its ingredients, on random layers, pieces and networks: status 1 if one is too small."""
    began = time.perf_counter()

    def job(subject: Subject) -> Job[CampaignReport | None]:
        def run() -> CampaignReport | None:
            late = seconds is not None and time.perf_counter() - began > seconds
            return None if late else examine(subject)

        return Job(subject.case.name, run)

    jobs = [job(subject) for subject in subjects(layers, seed, demo=demo, pieces=pieces, networks=networks)]
    done = carry_out(jobs)
    report = CampaignReport()
    for found in done.results:
        if found is not None:
            report.add(found)
    emit_json("campaign", {"seed": seed, **report.to_dict()}, stdout=as_json, out=out)
    if not as_json:
        _show(report)
        say_written(out)
    if not report.sound:
        raise typer.Exit(1)
    done.exit(len(jobs))


def _show(report: CampaignReport) -> None:
    table = Table(
        "bound, ingredient, constant or composition", "smallest slack", "refused", title="Bound / attained - 1"
    )
    for name in sorted({*report.slack, *report.refusals}):
        slack = f"{report.slack[name]:.3g}" if name in report.slack else ""
        table.add_row(name, slack, str(report.refusals.get(name, "")))
    console = Console()
    console.print(table)
    for kind, findings in (("violation", report.violations), ("failure", report.failures)):
        for finding in findings:
            counts = (
                int(not finding.is_piece and not finding.is_network),
                int(finding.is_piece),
                int(finding.is_network),
            )
            only = "--layers {} --pieces {} --networks {}".format(*counts)
            where = "" if finding.seed is None else f"; repeat with --no-demo {only} --seed {finding.seed}"
            console.print(
                f"{kind}: {finding.what} at {finding.layer}: {finding.detail}{where}", style="red", soft_wrap=True
            )
    verdict = f"{len(report.violations)} violations, {len(report.failures)} failures"
    examined = f"{report.layers} layers, {report.pieces} pieces, {report.networks} networks, {report.checks} checks"
    console.print(f"{examined} in {report.seconds:.0f} s: {verdict}")
