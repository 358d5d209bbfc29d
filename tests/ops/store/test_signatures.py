from ejkernel.ops.store.signatures import compare_signatures

ARRAY = {"dtype": "float32", "shape": [2, 3]}


def rules(**fields):
    return {"kwargs": {"rules": {"static": {"object": "m.Rules", "fields": {"scale": {"float": None}, **fields}}}}}


def test_arrays_differ_by_dtype_and_shape():
    assert compare_signatures({"args": [ARRAY]}, {"args": [{"dtype": "int8", "shape": [2]}]}) == [
        "args[0].dtype: float32 -> int8",
        "args[0].shape: (2, 3) -> (2,)",
    ]


def test_static_objects_differ_field_by_field():
    assert compare_signatures(rules(upper=0, lower=None), rules(upper=None, lower=None)) == [
        "kwargs.rules.upper: 0 -> null"
    ]
    assert compare_signatures(rules(upper=0), rules()) == ["kwargs.rules.upper: 0 -> absent"]


def test_floats_are_alike():
    assert compare_signatures(rules(), rules()) == []
