"""Targets of a run as JUnit XML: one test for each."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from holdfast.results import CertificationRun, Target


def render(run: CertificationRun, targets: Sequence[Target]) -> str:
    """The file as text."""
    missed = [target for target in targets if not run.meets(target)]
    counts = {"name": "holdfast", "tests": str(len(targets)), "failures": str(len(missed))}
    suite = ElementTree.Element("testsuite", counts)
    seconds = sum(record.seconds for record in run.records)
    for target in targets:
        where = {"classname": f"{run.model} on {run.data}", "name": f"certified {target}", "time": f"{seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", where)
        if target in missed:
            ElementTree.SubElement(case, "failure", {"message": f"{100 * run.shown(target):.4g} % are certified"})
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
