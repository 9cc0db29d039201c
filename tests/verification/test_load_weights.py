# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.engine.client import cpu_child, multi
from vllm_overlay.verification.load_weights import with_fixed_load_weights


def child(**settings):
    return {"kv_connector": "NixlConnector", "kv_connector_extra_config": settings}


MEASURED = [child(), child(load_weight="auto", min_tokens=5), {"kv_connector": "NixlConnector"}, child(load_weight=0.5)]
FIXED = [child(load_weight=1.0), child(load_weight=1.0, min_tokens=5), child(load_weight=1.0), child(load_weight=0.5)]


def test_measured_weights_become_numbers_and_numbers_stay():
    given = ["--model", "m", "--kv-transfer-config", json.dumps(multi(*MEASURED)), "--seed", "1"]
    found = with_fixed_load_weights(given)
    assert json.loads(found[3]) == multi(*FIXED)
    assert found[:3] + found[4:] == given[:3] + given[4:]


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv_transfer_config"])
def test_an_option_with_its_value_in_one_argument_is_known(option):
    (found,) = with_fixed_load_weights([f"{option}={json.dumps(multi(*MEASURED))}"])
    assert found.startswith(f"{option}=")
    assert json.loads(found.partition("=")[2]) == multi(*FIXED)


@pytest.mark.parametrize(
    "value",
    [
        *("{", "5", "[]", "null", '{"kv_connector_extra_config": 3}'),
        '{"kv_connector_extra_config": {"connectors": [3]}}',
        json.dumps(cpu_child()),
        json.dumps(multi(cpu_child())),
    ],
)
def test_what_has_no_measured_child_stays_as_it_is(value):
    given = ["--kv-transfer-config", value]
    assert with_fixed_load_weights(given) == given
