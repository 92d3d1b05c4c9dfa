from __future__ import annotations

from llmgw.admin.management import Refused
from llmgw.errors import LlmgwError, Problem


def test_a_refusal_carries_what_a_program_and_a_person_need() -> None:
    problem = Problem(key="name", message="is taken", where="m.yaml:1:1")
    refused = Refused("a name is taken", status=409, code="name_taken", problems=(problem,))
    assert isinstance(refused, LlmgwError)
    assert (str(refused), refused.status, refused.code, refused.problems) == (
        "a name is taken",
        409,
        "name_taken",
        (problem,),
    )
