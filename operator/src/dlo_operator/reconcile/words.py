"""Numbers and what is counted, as a sentence has them: one node, two nodes. Pure."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `0 nodes`."""
    return f"{number} {noun if number == 1 else f'{noun}s'}"


def of(number: int, whole: int, noun: str, verb: str) -> str:
    """`1 of 2 nodes holds`, `0 of 1 node hold`; the verb as for several."""
    one = {"are": "is"}.get(verb, f"{verb}s")
    return f"{number} of {counted(whole, noun)} {one if number == 1 else verb}"


def of_eligible(number: int) -> str:
    """How many nodes a deployment's pods may run on."""
    return f"{counted(number, 'node')} {'is' if number == 1 else 'are'} eligible"
