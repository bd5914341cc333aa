"""Every rule of `EngramConfig`, with its exact outcome."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from engram.config import EngramConfig

DEFAULTS = {
    "cpu_offload": True,
    "disk_offload": False,
    "embedding_across_dp": False,
    "dp_shared_memory": None,
    "use_thp": False,
}
VALUES = {name: (True, False) for name in DEFAULTS} | {"dp_shared_memory": (True, False, None)}
QWEN = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "text_config": {"ple_layer_ids": [2]},
}
PAIRS = [
    {first: first_value, second: second_value}
    for first, second in itertools.combinations(DEFAULTS, 2)
    for first_value in VALUES[first]
    for second_value in VALUES[second]
]
EVERY_COMBINATION = [
    dict(zip(DEFAULTS, values, strict=True))
    for values in itertools.product(*(VALUES[name] for name in DEFAULTS))
]


def parallel(tensor=1, data=1, elastic=False):
    return SimpleNamespace(
        tensor_parallel_size=tensor, data_parallel_size=data, enable_elastic_ep=elastic
    )


def quiet(**settings):
    """A configuration whose warnings are not the point of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return EngramConfig(**settings)


def expected_outcome(given):
    """The contradicting settings, or the settings that are warned about, from the rules."""
    full = DEFAULTS | given
    if full["disk_offload"]:
        ignored = ("use_thp", "dp_shared_memory", "embedding_across_dp")
        return None, sorted(name for name in ignored if full[name])
    if full["dp_shared_memory"] and not full["cpu_offload"]:
        return ("dp_shared_memory=True", "cpu_offload=False"), []
    if full["use_thp"] and not full["cpu_offload"]:
        return ("use_thp=True", "cpu_offload=False"), []
    if full["use_thp"] and full["dp_shared_memory"]:
        return ("use_thp=True", "dp_shared_memory=True"), []
    return None, []


ACCEPTED = [given for given in EVERY_COMBINATION if not expected_outcome(given)[0]]


# --- construction


@pytest.mark.case("C01")
def test_defaults_are_those_documented():
    assert EngramConfig().to_dict() == DEFAULTS
    assert EngramConfig().placement == "pinned"


@pytest.mark.case("C02")
@pytest.mark.case("M15")
@pytest.mark.parametrize("given", PAIRS + EVERY_COMBINATION, ids=json.dumps)
def test_each_combination_is_accepted_warned_about_or_refused(given):
    contradiction, ignored = expected_outcome(given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if contradiction:
            with pytest.raises(ValueError, match=" contradicts ") as refusal:
                EngramConfig(**given)
            assert " contradicts ".join(contradiction) in str(refusal.value)
        else:
            assert EngramConfig(**given).to_dict() == DEFAULTS | given
    assert sorted(str(warning.message).split("=")[0] for warning in caught) == ignored
    for warning in caught:
        assert warning.category is UserWarning
        assert "is ignored beside disk_offload=True" in str(warning.message)
        assert warning.filename == __file__


@pytest.mark.parametrize(
    ("given", "placement"),
    [
        ({}, "pinned"),
        ({"use_thp": True}, "pinned"),
        ({"cpu_offload": False}, "device"),
        ({"dp_shared_memory": True}, "shared"),
        ({"dp_shared_memory": False}, "pinned"),
        ({"disk_offload": True}, "file"),
        ({"disk_offload": True, "cpu_offload": False}, "file"),
        ({"disk_offload": True, "dp_shared_memory": True}, "file"),
    ],
)
def test_disk_offload_takes_precedence_then_cpu_offload(given, placement):
    assert quiet(**given).placement == placement


@pytest.mark.case("C03")
@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("disk_offlaod", "did you mean 'disk_offload'?"),
        ("host_file_gahter", "did you mean 'host_file_gather'?"),
        ("thp_packing", "now use_thp"),
        ("enable_engram_shared_memory", "now dp_shared_memory"),
        ("enable_engram_dp_sharding", "now embedding_across_dp"),
        ("disk_offload_dir", "now disk_offload"),
        ("zzz", "'zzz'"),
    ],
)
@pytest.mark.parametrize("build", [lambda key: EngramConfig(**{key: True}),
                                   lambda key: EngramConfig.from_dict({key: True}),
                                   lambda key: EngramConfig.from_json(json.dumps({key: True}))],
                         ids=["keyword", "dict", "json"])  # fmt: skip
def test_unknown_keys_are_refused_with_valid_keys_and_replacement(key, hint, build):
    with pytest.raises(ValueError, match="unknown setting") as refusal:
        build(key)
    message = str(refusal.value)
    assert repr(key) in message
    assert hint in message
    for name in [*DEFAULTS, "host_file_gather"]:
        assert name in message


@pytest.mark.case("C06")
@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize(
    "value", ["abc", "yes", "true", "False", "1", 1, 0, 2, -1, 0.5, 1.0, [], {}]
)
def test_values_that_are_no_booleans_are_refused(name, value):
    for build in (
        lambda given: EngramConfig(**given),
        EngramConfig.from_dict,
        lambda given: EngramConfig.of(json.dumps(given)),
    ):
        with pytest.raises(ValueError, match=f"{name} is .*, which is no boolean"):
            build({name: value})


def test_the_first_name_takes_booleans_alone_too():
    with pytest.raises(ValueError, match="disk_offload is 1, which is no boolean"):
        EngramConfig(host_file_gather=1)


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "dp_shared_memory"])
def test_only_dp_shared_memory_may_be_none(name):
    with pytest.raises(ValueError, match=name):
        EngramConfig(**{name: None})


def test_settings_are_given_by_name():
    with pytest.raises(ValueError, match="positional"):
        EngramConfig(False)


# --- the file backend's first name


@pytest.mark.parametrize("value", [True, False])
def test_alias_sets_disk_offload(value):
    for config in (
        EngramConfig(host_file_gather=value),
        EngramConfig.from_dict({"host_file_gather": value}),
        EngramConfig.of(json.dumps({"host_file_gather": value})),
        EngramConfig(host_file_gather=value, disk_offload=value),
    ):
        assert config.disk_offload is value
        assert config.host_file_gather is value
        assert config == EngramConfig(disk_offload=value)
        assert config.compute_hash() == EngramConfig(disk_offload=value).compute_hash()
        assert "host_file_gather" not in config.to_dict()


def test_alias_can_be_assigned():
    config = EngramConfig()
    config.host_file_gather = True
    assert config.disk_offload is True


@pytest.mark.case("C04")
@pytest.mark.parametrize("value", [True, False])
def test_both_names_with_different_values_conflict(value):
    for build in (
        lambda both: EngramConfig(**both),
        EngramConfig.from_dict,
        lambda both: EngramConfig.of(json.dumps(both)),
    ):
        with pytest.raises(
            ValueError, match=f"host_file_gather={value} contradicts disk_offload={not value}"
        ):
            build({"host_file_gather": value, "disk_offload": not value})


# --- mappings, JSON, and whatever a caller passes


@pytest.mark.parametrize("given", [{}, {"use_thp": True}, {"disk_offload": True}], ids=json.dumps)
def test_of_takes_a_config_a_mapping_or_json(given):
    config = EngramConfig(**given)
    assert EngramConfig.of(config) is config
    assert EngramConfig.of(given) == config
    assert EngramConfig.of(json.dumps(given)) == config
    assert EngramConfig.from_json(json.dumps(given).encode()) == config
    assert EngramConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("given", [None, 1, ["disk_offload"], object()])
def test_of_refuses_anything_else(given):
    with pytest.raises(TypeError, match=f"not {type(given).__name__}"):
        EngramConfig.of(given)


def test_from_dict_refuses_what_is_no_mapping_of_names():
    with pytest.raises(TypeError, match="must be a mapping"):
        EngramConfig.from_dict([("disk_offload", True)])
    with pytest.raises(ValueError, match="names must be strings, not 1"):
        EngramConfig.from_dict({1: True})


@pytest.mark.parametrize("text", ["", "{", "[]", "true", '"disk_offload"', "disk_offload"])
def test_json_that_is_no_object_is_refused(text):
    with pytest.raises(ValueError, match="must be a JSON object"):
        EngramConfig.of(text)


@pytest.mark.case("C04")
def test_a_key_given_twice_in_json_is_refused():
    with pytest.raises(ValueError, match="'use_thp' is given twice"):
        EngramConfig.of('{"use_thp": true, "cpu_offload": true, "use_thp": false}')


@pytest.mark.case("C01")
@pytest.mark.parametrize("explicit", [{}, {"cpu_offload": True}, {"cpu_offload": False}])
@pytest.mark.parametrize("environment", ["0", "1", "true", "false"])
def test_no_environment_variable_sets_anything(monkeypatch, explicit, environment):
    for name in DEFAULTS | {"host_file_gather": None, "ple_cpu_offload": None}:
        for prefix in ("", "VLLM_", "ENGRAM_", "VLLM_ENGRAM_"):
            monkeypatch.setenv(prefix + name.upper(), environment)
    assert EngramConfig(**explicit).to_dict() == DEFAULTS | explicit


# --- the platform


@pytest.mark.case("C08")
@pytest.mark.parametrize("disk_offload", [True, False])
@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu", "xpu", "", "CUDA"])
def test_a_platform_serves_the_settings_or_refuses_them(platform, disk_offload):
    config = EngramConfig(disk_offload=disk_offload)
    before = config.to_dict()
    if platform not in ("cuda", "rocm", "cpu"):
        with pytest.raises(ValueError, match="supported are cuda, rocm, cpu"):
            config.verify_model_config(QWEN, platform=platform)
    elif disk_offload and platform == "rocm":
        with pytest.raises(ValueError, match=r"disk_offload=True is not supported on .*'rocm'"):
            config.verify_model_config(QWEN, platform=platform)
    else:
        config.verify_model_config(QWEN, platform=platform)
    assert config.to_dict() == before


@pytest.mark.case("C08")
def test_the_detected_platform_is_asked(monkeypatch):
    monkeypatch.setattr("engram.config.detect_platform", lambda: "rocm")
    with pytest.raises(ValueError, match="rocm"):
        EngramConfig(disk_offload=True).verify_model_config(QWEN)
    EngramConfig().verify_model_config(QWEN)


# --- the topology


@pytest.mark.parametrize("given", ACCEPTED, ids=json.dumps)
def test_sharing_is_resolved_in_place(given):
    for data, elastic in itertools.product((1, 2, 8), (True, False)):
        config = quiet(**given)
        config.resolve_dp_shared_memory(parallel(data=data, elastic=elastic))
        if given["dp_shared_memory"] is None:
            shared = given["cpu_offload"] and not given["use_thp"] and data > 1 and not elastic
            assert config.dp_shared_memory is shared
            assert config.dp_shared_memory_required is False
        else:
            assert config.dp_shared_memory is given["dp_shared_memory"]
            assert config.dp_shared_memory_required is given["dp_shared_memory"]
        assert config.to_dict() == given, "handed over as it was written"
        resolved = config.dp_shared_memory
        config.resolve_dp_shared_memory(parallel(data=1))
        assert config.dp_shared_memory is resolved


def test_what_the_user_wrote_is_outside_fields_and_hash_but_survives_copies():
    default, explicit = EngramConfig(), EngramConfig(dp_shared_memory=True)
    for config in (default, explicit):
        config.resolve_dp_shared_memory(parallel(data=2))
    assert default == explicit
    assert repr(default) == repr(explicit)
    assert dataclasses.asdict(default) == dataclasses.asdict(explicit) == explicit.to_dict()
    assert default.to_dict() == DEFAULTS
    assert default.compute_hash() == explicit.compute_hash()
    for duplicate in (
        copy.copy,
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        dataclasses.replace,
        lambda config: dataclasses.replace(config, use_thp=False),
        lambda config: EngramConfig.from_dict(config.to_dict()),
        lambda config: EngramConfig.from_json(config.to_json()),
        lambda config: EngramConfig(**json.loads(config.to_json())),
    ):
        for config in (duplicate(default), duplicate(explicit)):
            config.resolve_dp_shared_memory(parallel(data=2))
            assert config == explicit
        assert duplicate(default).dp_shared_memory_required is False
        assert duplicate(explicit).dp_shared_memory_required is True


def test_a_default_that_was_resolved_becomes_a_demand_only_when_written():
    config = EngramConfig()
    config.resolve_dp_shared_memory(parallel(data=2))
    assert config.dp_shared_memory is True
    assert dataclasses.replace(config, dp_shared_memory=True).dp_shared_memory_required is True
    # What suited one topology is resolved anew for another.
    other = dataclasses.replace(config)
    other.resolve_dp_shared_memory(parallel(data=1))
    assert other.dp_shared_memory is False
    assert dataclasses.replace(config, use_thp=True).use_thp is True
    config.dp_shared_memory = True
    assert config.dp_shared_memory_required is True
    config.dp_shared_memory = None
    assert config.dp_shared_memory is None


def test_errors_carry_the_attributes_of_all_others():
    config = EngramConfig()
    for call in (
        lambda: EngramConfig(use_thp=1),
        lambda: EngramConfig(nonsense=True),
        lambda: EngramConfig.of("{"),
        lambda: EngramConfig.of(3),
        lambda: EngramConfig.from_dict([]),
        lambda: config.verify_model_config(None),
        lambda: config.resolve_dp_shared_memory(object()),
        lambda: config.verify_parallel_config({"data_parallel_size": 0}),
        lambda: config.get_parallel_size(object()),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        for name in ("path", "table", "row", "position", "offset"):
            assert getattr(error.value, name) is None


@pytest.mark.case("C01")
def test_the_resolved_configuration_is_logged_once(caplog):
    config = EngramConfig(use_thp=True)
    with caplog.at_level(logging.INFO, logger="engram"):
        config.resolve_dp_shared_memory(parallel(data=2))
        config.resolve_dp_shared_memory(parallel(data=2))
    assert len(caplog.records) == 1
    logged = json.loads(caplog.messages[0].removeprefix("engram configuration: "))
    assert logged == DEFAULTS | {"use_thp": True, "dp_shared_memory": False}


@pytest.mark.case("C02")
@pytest.mark.parametrize("given", ACCEPTED, ids=json.dumps)
def test_topologies_that_cannot_work_are_refused(given):
    for data, elastic in itertools.product((1, 2, 8), (True, False)):
        config = quiet(**given)
        if given["disk_offload"]:
            refused = ("disk_offload", "enable_elastic_ep") if elastic else None
        elif given["dp_shared_memory"] and data <= 1:
            refused = ("dp_shared_memory", "data_parallel_size")
        elif given["dp_shared_memory"] and elastic:
            refused = ("dp_shared_memory", "enable_elastic_ep")
        elif given["embedding_across_dp"] and data > 1 and elastic:
            refused = ("embedding_across_dp", "enable_elastic_ep")
        else:
            refused = None
        topology = parallel(data=data, elastic=elastic)
        if refused:
            with pytest.raises(ValueError, match=f"{refused[0]}=True contradicts {refused[1]}="):
                config.verify_parallel_config(topology)
        else:
            config.verify_parallel_config(topology)


@pytest.mark.case("C02")
def test_contradictions_assigned_later_are_found_by_each_check():
    config = EngramConfig()
    config.cpu_offload = False
    config.use_thp = True
    with pytest.raises(ValueError, match="use_thp=True contradicts cpu_offload=False"):
        config.verify_parallel_config(parallel())
    with pytest.raises(ValueError, match="use_thp=True contradicts cpu_offload=False"):
        config.verify_model_config(QWEN, platform="cpu")


def test_what_sharing_by_default_resolves_to_passes_the_check():
    for data, elastic in itertools.product((1, 2), (True, False)):
        config = EngramConfig()
        config.resolve_dp_shared_memory(parallel(data=data, elastic=elastic))
        config.verify_parallel_config(parallel(data=data, elastic=elastic))


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("data", [1, 2, 3])
def test_parallel_size_spans_data_parallel_ranks_only_when_asked(tensor, data):
    topology = parallel(tensor=tensor, data=data)
    assert EngramConfig().get_parallel_size(topology) == tensor
    assert EngramConfig(embedding_across_dp=True).get_parallel_size(topology) == tensor * data
    as_mapping = vars(topology)
    assert EngramConfig(embedding_across_dp=True).get_parallel_size(as_mapping) == tensor * data


def test_a_single_process_needs_no_topology():
    config = EngramConfig(embedding_across_dp=True)
    config.resolve_dp_shared_memory()
    config.verify_parallel_config()
    assert config.dp_shared_memory is False
    assert config.get_parallel_size() == 1


@pytest.mark.case("C06")
@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("value", ["abc", "2", -1, 0, 1.5, None, True])
def test_sizes_that_are_no_positive_integers_are_refused(name, value):
    for method in ("resolve_dp_shared_memory", "verify_parallel_config", "get_parallel_size"):
        with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
            getattr(EngramConfig(), method)({name: value})


def test_an_object_without_a_topology_is_refused():
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        EngramConfig().get_parallel_size(object())
    with pytest.raises(TypeError, match="data_parallel_size"):
        EngramConfig().resolve_dp_shared_memory({"dp": 2})


# --- the hash


def test_hash_is_stable_and_sees_every_field():
    # A literal: servers key compiled artefacts on it, so it may not drift between releases.
    default = "e6a40055c6f83f4ea5f3bf7308dd5ce3407577ff10ca25c904b532c006898f42"
    assert EngramConfig().compute_hash() == default
    hashes = [quiet(**given).compute_hash() for given in ACCEPTED]
    assert len(set(hashes)) == len(hashes)
    for name in DEFAULTS:
        config = EngramConfig()
        setattr(config, name, not getattr(config, name))
        assert config.compute_hash() != default


def test_hash_is_the_same_in_another_process():
    program = "from engram.config import EngramConfig; print(EngramConfig().compute_hash())"
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == EngramConfig().compute_hash()
