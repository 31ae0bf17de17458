"""What type checkers see of a package whose names are imported when they are first used."""

import ast
import inspect

import attnswap


def test_every_name_of_the_front_door_has_a_type():
    """A name that is missing here would be Any, by the module's `__getattr__`, and no checker would say so."""
    (typed,) = [
        node
        for node in ast.parse(inspect.getsource(attnswap)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    aliases = [alias for statement in typed.body for alias in statement.names]
    assert all(alias.asname == alias.name for alias in aliases), "`as` makes it public"
    assert {alias.name for alias in aliases} == {*attnswap.__all__, "__version__"}
