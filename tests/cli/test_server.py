"""`remat-kit mcp`, asked by a client of the protocol over standard input and output."""

import json
import os
import pathlib
import sys
import textwrap

import anyio
import jsonschema
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from remat_kit._cli.schema import schema

ROOT = pathlib.Path(__file__).parents[2]
NOISY = """
    import os, jax, jax.numpy as jnp
    print("on standard output")
    os.write(1, b"and below it\\n")

    def build(policy=None, width=8):
        return lambda x: jnp.sum(jnp.sin(x)), (jax.ShapeDtypeStruct((width,), jnp.float32),)
"""
SMALL = {"model": "mlp", "sizes": {"batch": 4, "features": 8, "hidden": 8}}


@pytest.fixture
def session(tmp_path):
    """Run an async function with a client of a server that works in an empty folder."""

    def session(talk):
        async def run():
            environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            for name in ("REMAT_KIT_CACHE", "HOME"):
                if name in os.environ:
                    environment[name] = os.environ[name]
            server = StdioServerParameters(
                command=sys.executable,
                args=["-P", "-m", "remat_kit", "mcp"],
                env=environment,
                cwd=tmp_path,
            )
            async with Client(stdio_client(server)) as client:
                return await talk(client)

        with anyio.from_thread.start_blocking_portal() as portal:
            return portal.call(run)

    return session


def test_the_server_says_what_it_can(session):
    async def talk(client):
        return client.server_info, client.instructions, (await client.list_tools()).tools

    info, instructions, tools = session(talk)
    assert info.name == "remat-kit"
    assert "rematerialization" in instructions
    by_name = {tool.name: tool for tool in tools}
    assert set(by_name) == {"inspect", "plan", "fit", "targets"}
    assert not by_name["inspect"].annotations.read_only_hint  # it imports a model's file
    assert by_name["targets"].annotations.read_only_hint
    for tool in tools:
        assert tool.description
        for field, what in tool.input_schema["properties"].items():
            assert what.get("description"), (tool.name, field)
    assert by_name["fit"].input_schema["required"] == ["model", "batches"]


def test_inspect_and_targets_answer_as_the_command_line_does(session, tmp_path):
    """What the model's file prints, by Python or below it, does not reach the protocol."""
    (tmp_path / "noisy.py").write_text(textwrap.dedent(NOISY))
    progress = []

    async def heard(_, __, message):
        progress.append(message)

    async def talk(client):
        chips = await client.call_tool("targets", {})
        asked = {"model": "noisy.py:build", "sizes": {"width": 4}, "targets": ["cpu"]}
        return chips, await client.call_tool("inspect", asked, progress_callback=heard)

    chips, found = session(talk)
    assert not chips.is_error
    assert not found.is_error
    jsonschema.validate(chips.structured_content, schema("targets"))
    jsonschema.validate(found.structured_content, schema("inspect"))
    assert found.structured_content["model"] == "noisy.py:build"
    assert found.structured_content["size"] == {"width": 4}
    (report,) = found.structured_content["policies"]
    assert report["saved_bytes"] == 16
    assert report["memory"]["cpu"]["fits"]
    assert found.structured_content["headline"] in found.content[0].text
    assert any("cpu" in line for line in progress)


@pytest.mark.slow
def test_the_lists_of_a_report_are_cut_and_the_rest_is_counted(session):
    async def talk(client):
        asked = {"model": "gpt", "sizes": {"size": "tiny"}, "targets": ["cpu"]}
        return await client.call_tool("inspect", asked)

    (report,) = session(talk).structured_content["policies"]
    assert len(report["saved"]) == 20
    sizes = [saved["bytes"] for saved in report["saved"]]
    assert sizes == sorted(sizes, reverse=True)
    peak = report["peak"]["cpu"]
    assert len(peak["buffers"]) == 20
    assert peak["buffers_left_out"] > 20
    assert len(json.dumps(report)) < 40_000


@pytest.mark.slow
def test_plan_answers_with_a_policy(session):
    async def talk(client):
        return await client.call_tool("plan", SMALL | {"budget": "min"})

    found = session(talk)
    assert not found.is_error
    jsonschema.validate(found.structured_content, schema("plan"))
    from remat_kit._policy.reading import as_policy

    as_policy(found.structured_content["policy"], call="test")


@pytest.mark.slow
def test_fit_answers_with_a_table(session):
    async def talk(client):
        asked = {"model": "mlp", "sizes": {"features": 8}, "batches": [4, 8], "targets": ["cpu"]}
        return await client.call_tool("fit", asked)

    found = session(talk)
    assert not found.is_error
    jsonschema.validate(found.structured_content, schema("fit"))
    assert [cell["batch"] for cell in found.structured_content["cells"]] == [4, 8]


def test_errors_are_those_of_the_tool_with_their_text(session, tmp_path):
    asked = {
        "a name": ("inspect", {"model": "gtp"}, "did you mean 'gpt'?"),
        "an option": ("fit", {"model": "--html=page", "batches": [1]}, "no module --html=page"),
        "another option": ("plan", SMALL | {"target": "--save=plan"}, "named '--save=plan'"),
        "a missing argument": ("fit", {"model": "mlp"}, "batches"),
        "a tool": ("measure", {}, "measure"),
    }

    async def talk(client):
        return {name: await client.call_tool(*call) for name, (*call, _) in asked.items()}

    for name, found in session(talk).items():
        assert found.is_error, name
        assert asked[name][2] in found.content[0].text, name
        assert "Traceback" not in found.content[0].text
    assert not list(tmp_path.iterdir())  # no text of a call was taken for an option


SLOW = """
    import os, pathlib, time

    def build(policy=None):
        pathlib.Path("pid").write_text(str(os.getpid()))
        time.sleep(600)
"""


def test_long_work_does_not_block_and_ends_with_its_call(session, tmp_path):
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW))
    pid = tmp_path / "pid"

    async def talk(client):
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "inspect", {"model": "slow.py:build"})
            with anyio.fail_after(60):
                while not pid.exists() or not pid.read_text():
                    await anyio.sleep(0.1)
            found = await client.call_tool("targets", {})
            assert not found.is_error
            os.kill(int(pid.read_text()), 0)  # the other call still works
            group.cancel_scope.cancel()
        with anyio.fail_after(30):
            while _runs(int(pid.read_text())):
                await anyio.sleep(0.1)
        return await client.list_tools()

    assert session(talk).tools


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_missing_package_is_said(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    message, hint = refused("mcp")
    assert "the package mcp is not installed" in message
    assert hint == "pip install 'remat-kit[mcp]'"
