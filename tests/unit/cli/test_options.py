"""What commands that serve have in common."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from llmgw.cli.options import file_options, node_options, say_not_in_effect
from llmgw.config.definition import Definition
from llmgw.core.model import Model, ModelName


@click.command()
@node_options
def shown(**options: object) -> None:
    click.echo(sorted(options.items(), key=lambda item: item[0]))


def test_the_file_is_called_by_its_name() -> None:
    @click.command()
    @file_options("x.yaml")
    def with_file(**options: object) -> None:
        click.echo(sorted(options.items(), key=lambda item: item[0]))

    assert "Another x.yaml than the usual one." in CliRunner().invoke(with_file, ["--help"]).output
    given = CliRunner().invoke(with_file, ["-v", "--config", "/f"]).output
    assert given == "[('config', PosixPath('/f')), ('verbose', True)]\n"


def test_without_options_nothing_is_overridden() -> None:
    assert CliRunner().invoke(shown, []).output == "[('config', None), ('port', None), ('verbose', False)]\n"


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    done = CliRunner().invoke(shown, ["--port", port])
    assert done.exit_code == 2
    assert "--port" in done.output


def test_keys_that_do_nothing_yet_are_named_once_for_each_model(capfd: pytest.CaptureFixture[str]) -> None:
    def define(name: str, *keys: str) -> Definition:
        model = Model(name=ModelName(name), source="/w.gguf")
        return Definition(model=model, scaled=True, not_in_effect=keys, places={})

    say_not_in_effect((define("quiet"), define("eager", "max_output", "routing_profile")))
    assert capfd.readouterr().err == "eager: not in effect yet: max_output, routing_profile\n"
