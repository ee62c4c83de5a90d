"""Open a local page over the runs; see `python studio.py --help`."""

import secrets
import sys

import hydra
from omegaconf import DictConfig

from cli.arguments import hydras_errors, read_arguments
from cli.resolvers import CONF
from cli.terminal import command_line, one_line_errors


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="studio")
def _run(cfg: DictConfig) -> None:
    with one_line_errors():
        from extras.page.app import serve

        serve(cfg.host, cfg.port, str(cfg.token or secrets.token_urlsafe(16)), cfg.open)


def main() -> None:
    with command_line(), hydras_errors("studio"):
        sys.argv[1:] = read_arguments(sys.argv[1:], "studio")
        _run()


if __name__ == "__main__":
    main()
