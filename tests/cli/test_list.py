"""`polyformer list` says of every member and preset what it is."""

import re
from collections import Counter

from polyformer.cli.commands.list import entries
from polyformer.cli.documentation import members
from polyformer.core.registry import in_package

FRAGMENT = re.compile(r"(Of|All of|Nothing|What|Where|As|The same|With)\b|`\w+`:")


def test_every_member_and_preset_is_described():
    of_tests = {(axis, name) for axis, name, member in members() if not in_package(member)}
    rows = [row for row in entries() if row[0] != "recipe" and row[:2] not in of_tests]
    times = Counter((axis, text) for axis, _, text, _ in rows)
    refused = [
        (axis, name, text)
        for axis, name, text, _ in rows
        if not 20 <= len(text) <= 120
        or not re.match(r"[A-Z`]", text)
        or FRAGMENT.match(text)
        or times[axis, text] > 1
    ]
    assert not refused
