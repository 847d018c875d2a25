"""Proof results as text, JSON and Markdown, and the exit code they amount to."""

import textwrap
from typing import Any

from spec.prove.engine import ClaimResult, Outcome, RefutationResult, TheoremResult
from spec.prove.theorem import Claim, Contract, Symbol, Theorem

WIDTH = 108

Meanings = dict[str, list[str]]
"""For each letter of a theorem what it stands for, one entry for each meaning."""


def _block(label: str, text: str, indent: int = 5) -> str:
    head = " " * indent + f"{label:<10} "
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def domain_text(claim: Claim, told: Meanings | None = None) -> str:
    """The domain of a claim and its side conditions.

    A letter that has several meanings in the theorem (`told`) has its own beside it.
    """

    def domain(symbol: Symbol) -> str:
        several = told is not None and len(told[symbol.name]) > 1
        return f"{symbol.domain} ({symbol.meaning})" if several else symbol.domain

    parts = [", ".join(domain(symbol) for symbol in claim.symbols)]
    parts += [hypothesis.text for hypothesis in claim.hypotheses]
    return "; ".join(parts)


def point_text(point: dict[str, int]) -> str:
    """An assignment for people."""
    return ", ".join(f"{name} = {value}" for name, value in point.items())


def _claim_text(result: ClaimResult, told: Meanings) -> str:
    mark = "" if result.verdict == "proved" else f"{result.verdict.upper()}: "
    text = f"{mark}{result.claim.name} [{domain_text(result.claim, told)}]"
    if result.counterexample is not None:
        text += f"; false at {point_text(result.counterexample)}"
    if result.reason:
        text += f"; {result.reason}"
    return _block("claim", text)


def _refutation_text(result: RefutationResult) -> str:
    refutation = result.refutation
    lines = [_block("refutes", f"{refutation.formula} ({refutation.kind}): {result.verdict}")]
    if result.reason:
        lines.append(_block("", result.reason))
    if result.verdict == "refuted" or result.smallest is not None:
        lines.append(_block("  reported", refutation.tell(**refutation.witness)))
    if result.smallest is not None:
        lines.append(_block("  smallest", refutation.tell(**result.smallest)))
    return "\n".join(lines)


def meanings(theorem: Theorem) -> Meanings:
    """What each letter of a theorem's claims means there, in order of first use."""
    found: Meanings = {}
    for symbol in (symbol for claim in theorem.claims for symbol in claim.symbols):
        if symbol.meaning not in found.setdefault(symbol.name, []):
            found[symbol.name].append(symbol.meaning)
    return found


def letters(theorem: Theorem) -> str:
    """What each letter of a theorem's claims means, if it means the same in all of them."""
    told = meanings(theorem)
    return "; ".join(
        f"{name}: {meaning[0] if len(meaning) == 1 else 'as each claim says'}"
        for name, meaning in told.items()
    )


def theorem_text(result: TheoremResult) -> str:
    """A row of the table with everything it rests on."""
    theorem = result.theorem
    lines = [f"{theorem.number:>3}. {theorem.name:<40} {result.verdict:<12} {result.seconds:6.2f} s"]
    lines.append(_block("states", theorem.statement))
    lines.append(_block("letters", letters(theorem)))
    told = meanings(theorem)
    lines += [_claim_text(claim, told) for claim in result.claims]
    lines.append(_block("lemmas", ", ".join(result.lemmas) or "none"))
    lines.append(_block("contracts", ", ".join(c.name for c in theorem.contracts) or "none"))
    lines += [_refutation_text(refutation) for refutation in result.refutes]
    lines += [_block("remark", remark) for remark in theorem.remarks]
    return "\n".join(lines)


def lemma_text(outcome: Outcome) -> str:
    """The lemmas that proofs used, with their own verdicts."""
    lines = ["Lemmas (each an obligation of its own)"]
    for result in outcome.lemmas:
        lines.append(f"     {result.claim.name:<28} {result.verdict:<12} {domain_text(result.claim)}")
    return "\n".join(lines) + "\n"


def contracts_of(theorems: tuple[Theorem, ...]) -> tuple[Contract, ...]:
    """Every contract that a theorem rests on, once."""
    return tuple(dict.fromkeys(contract for theorem in theorems for contract in theorem.contracts))


def contract_text(outcome: Outcome) -> str:
    """The postconditions of loops over data that theorems assume; props/ checks them by brute force.

    Empty if there are none."""
    assumed = contracts_of(tuple(result.theorem for result in outcome.theorems))
    if not assumed:
        return ""
    lines = ["Contracts (assumed here, checked by brute force in props/)"]
    lines += [_block(contract.name + ":", contract.statement) for contract in assumed]
    return "\n".join(lines) + "\n\n"


def exit_code(outcome: Outcome) -> int:
    """0 as expected, 1 a refuted theorem or lemma, 3 undetermined or an expected refutation not found."""
    verdicts = {claim.verdict for result in outcome.theorems for claim in result.claims}
    verdicts |= {result.verdict for result in outcome.lemmas}
    if "refuted" in verdicts:
        return 1
    refutations = {r.verdict for result in outcome.theorems for r in result.refutes}
    return 3 if "undetermined" in verdicts or refutations - {"refuted"} else 0


def summary(outcome: Outcome, solver: str, seconds: float) -> str:
    """One line: how many theorems, claims, lemmas and refutations came out as expected."""
    claims = [claim for result in outcome.theorems for claim in result.claims]
    refutations = [r for result in outcome.theorems for r in result.refutes]

    def share(name: str, results: list[str], wanted: str) -> str:
        return f"{name} {results.count(wanted)}/{len(results)} {wanted}"

    return ", ".join(
        (
            share("theorems", [result.verdict for result in outcome.theorems], "proved"),
            share("claims", [claim.verdict for claim in claims], "proved"),
            share("lemmas", [result.verdict for result in outcome.lemmas], "proved"),
            *([share("formulas", [r.verdict for r in refutations], "refuted")] if refutations else []),
            f"{solver}, {seconds:.1f} s",
        )
    )


def _claim_json(result: ClaimResult) -> dict[str, Any]:
    claim = result.claim
    return {
        "name": claim.name,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 4),
        "symbols": {s.name: {"least": s.least, "meaning": s.meaning} for s in claim.symbols},
        "hypotheses": [h.text for h in claim.hypotheses],
        "hypotheses_hold_at": result.instance,
        "paths": result.paths,
        "products": result.products,
        "lemmas": [lemma.name for lemma in result.lemmas],
        "counterexample": result.counterexample,
        "reason": result.reason,
    }


def _refutation_json(result: RefutationResult) -> dict[str, Any]:
    refutation = result.refutation
    return {
        "formula": refutation.formula,
        "kind": refutation.kind,
        "verdict": result.verdict,
        "seconds": round(result.seconds, 4),
        "reported": refutation.witness,
        "reported_text": refutation.tell(**refutation.witness),
        "smallest": result.smallest,
        "smallest_text": refutation.tell(**result.smallest) if result.smallest is not None else None,
        "solver_counterexample": result.solver,
        "reason": result.reason,
    }


def as_json(outcome: Outcome, group: str, solver: str, seed: int) -> dict[str, Any]:
    """Everything for machines; `schema` changes when a key changes its meaning."""
    return {
        "schema": 1,
        "group": group,
        "solver": solver,
        "seed": seed,
        "exit_code": exit_code(outcome),
        "theorems": [
            {
                "number": result.theorem.number,
                "name": result.theorem.name,
                "group": result.theorem.group,
                "statement": result.theorem.statement,
                "verdict": result.verdict,
                "seconds": round(result.seconds, 4),
                "claims": [_claim_json(claim) for claim in result.claims],
                "lemmas": list(result.lemmas),
                "contracts": [contract.name for contract in result.theorem.contracts],
                "refutes": [_refutation_json(refutation) for refutation in result.refutes],
                "remarks": list(result.theorem.remarks),
            }
            for result in outcome.theorems
        ],
        "lemmas": [_claim_json(result) for result in outcome.lemmas],
        "contracts": {
            contract.name: contract.statement
            for contract in contracts_of(tuple(result.theorem for result in outcome.theorems))
        },
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def as_markdown(outcome: Outcome, group: str) -> str:
    """The documentation page: a table, then each theorem; only the seconds differ from run to run."""
    lines = [
        "# Theorems",
        "",
        f"Generated by `python -m spec.prove {group} --markdown docs/theorems.md`; do not edit.",
        "",
        "Every claim holds for all integers in its domain, symbolic block and chunk sizes included. Each",
        "refuted formula comes with the counterexample to report and the smallest one.",
        "`python -m spec.prove.mutants` changes each shared formula a little and asks whether a theorem",
        "notices; what survives is listed with its reason, or is a theorem that is missing.",
        "`python -m spec.prove --file FORMULAS.py` judges formulas of your own by these claims",
        "([an example](../README.md#prove-your-own-formula)).",
        "",
        "| # | theorem | verdict | claims | refutes | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for result in outcome.theorems:
        theorem = result.theorem
        lines.append(
            f"| {theorem.number} | [{_cell(theorem.name)}](#theorem-{theorem.number}) | {result.verdict} "
            f"| {len(result.claims)} | {len(result.refutes)} | {result.seconds:.2f} |"
        )
    for result in outcome.theorems:
        theorem = result.theorem
        lines += ["", f"## Theorem {theorem.number}", "", f"**{_cell(theorem.name)}** ({theorem.group}). "]
        lines[-1] += _cell(theorem.statement)
        lines += ["", f"Letters: {_cell(letters(theorem))}.", ""]
        told = meanings(theorem)
        for claim in result.claims:
            lines.append(f"- {claim.verdict}: {_cell(claim.claim.name)} — `{domain_text(claim.claim, told)}`")
        lines += ["", f"Lemmas: {', '.join(result.lemmas) or 'none'}. "]
        lines[-1] += f"Contracts: {', '.join(c.name for c in theorem.contracts) or 'none'}."
        for refutation in result.refutes:
            record = refutation.refutation
            lines += ["", f"Refutes ({record.kind}): {_cell(record.formula)}", ""]
            lines.append(f"- reported: {_cell(record.tell(**record.witness))}")
            if refutation.smallest is not None:
                lines.append(f"- smallest: {_cell(record.tell(**refutation.smallest))}")
        for remark in theorem.remarks:
            lines += ["", f"Remark: {_cell(remark)}"]
    lines += ["", "## Lemmas", ""]
    for lemma in outcome.lemmas:
        lines.append(f"- {lemma.verdict}: {lemma.claim.name} — `{domain_text(lemma.claim)}`")
    lines += [
        "",
        "## Contracts",
        "",
        "Postconditions of loops over data, assumed above and checked in `props/`.",
        "",
    ]
    for contract in contracts_of(tuple(result.theorem for result in outcome.theorems)):
        lines.append(f"- {contract.name}: {_cell(contract.statement)}")
    return "\n".join(lines) + "\n"
