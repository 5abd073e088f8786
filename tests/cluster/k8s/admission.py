"""What the admission policy makes of a pod: its CEL evaluated by celpy, its patches applied as the API server applies them.

Not the API server's own code: types are not checked, and of its patches only those that the policy uses are known.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.cluster.k8s.manifests import ROOT, Object, Pod, checkout, objects

celpy = pytest.importorskip("celpy", reason="pip install cel-python")

_KEYS = {"volumes": "name", "containers": "name", "env": "name", "volumeMounts": "mountPath"}
"""The lists that are merged by a key; an apply configuration with any other list, which is atomic, is refused."""


class Type(celpy.celtypes.MessageType):  # type: ignore[misc, name-defined, unused-ignore]
    """A CEL type such as ``Object.spec.volumes``, with the types of its fields as attributes. A call makes an object of it."""

    def get(self, name: Any, default: Any = None) -> Type:
        return Type()

    def __call__(self, fields: Any) -> Any:
        return celpy.celtypes.MapType(fields or {})


def evaluate(expression: str, values: Object) -> Any:
    """The value of a CEL expression, as JSON. Raises `celpy.CELEvalError`, `celpy.CELParseError`."""
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    given = {name: celpy.json_to_cel(value) for name, value in values.items()}
    return _plain(program.evaluate({**given, "Object": Type(), "JSONPatch": Type()}))


def _plain(value: Any) -> Any:
    if isinstance(value, celpy.CELEvalError):  # an error in an object is its field's value
        raise value
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, celpy.celtypes.BoolType):
        return bool(value)
    return int(value) if isinstance(value, int) else str(value)


def applied() -> list[Object]:
    """The policy and its binding."""
    return objects(checkout() / "admission")


def policy() -> Object:
    (found,) = (each for each in applied() if each["kind"] == "MutatingAdmissionPolicy")
    return found


def params(**data: str) -> Object:
    """A namespace's ConfigMap, with more `data`."""
    import yaml

    found: Object = yaml.safe_load((ROOT / "k8s" / "admission" / "inject.yaml").read_text())
    found["data"] |= data
    return found


def as_pod(template: Pod, **labels: str) -> Object:
    """The pod that a controller makes of a template, with the labels that it adds."""
    metadata = {**template.metadata, "name": "pod", "labels": {**template.metadata.get("labels", {}), **labels}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy.deepcopy(template.spec)}


def inject(policy: Object, pod: Object, params: Object | None) -> Object:
    """The pod that `policy` makes of `pod`, in a namespace with the ConfigMap `params`."""
    spec, made = policy["spec"], copy.deepcopy(pod)
    wanted = spec["matchConstraints"]["objectSelector"]["matchLabels"]
    if params is None or not wanted.items() <= pod["metadata"].get("labels", {}).items():
        return made
    values: Object = {"object": made, "params": params}
    if not all(evaluate(each["expression"], values) for each in spec["matchConditions"]):
        return made
    values["variables"] = {}
    for each in spec["variables"]:
        values["variables"][each["name"]] = evaluate(each["expression"], values)
    for each in spec["mutations"]:
        if each["patchType"] == "JSONPatch":
            for patch in evaluate(each["jsonPatch"]["expression"], values):
                _add(made, patch)
        else:
            _merge(made, evaluate(each["applyConfiguration"]["expression"], values))
    return made


def _add(made: Any, patch: Object) -> None:
    assert patch["op"] == "add"
    *parents, last = patch["path"].removeprefix("/").split("/")
    for name in parents:
        made = made[name]
    if last == "-":
        made.append(patch["value"])
    else:
        made[last] = patch["value"]


def _merge(made: Object, applied: Object) -> None:
    for name, value in applied.items():
        if isinstance(value, list):
            key, there = _KEYS[name], made.setdefault(name, [])
            for item in value:
                same = [each for each in there if each[key] == item[key]]
                if not same:
                    there.append(item)
                for each in same:
                    _merge(each, item)
        elif isinstance(value, dict):
            _merge(made.setdefault(name, {}), value)
        else:
            made[name] = value
