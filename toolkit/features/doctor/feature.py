"""The command `toolkit doctor`."""

from __future__ import annotations

import argparse

from toolkit.utils.features import Command, Feature


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--main_process_ip", metavar="ADDRESS", help="the first machine's, to check several"
    )
    add(
        "--num_machines",
        type=int,
        default=2,
        metavar="N",
        help="how many there are then [2]",
    )
    add("--machine_rank", metavar="N", help="which this one is; of two it is known")
    add("--main_process_port", metavar="PORT", help="the first machine's [29600]")
    add("--output_dir", default="runs", help="where a run would write [runs]")
    add(
        "--rendezvous_timeout",
        type=float,
        default=30,
        metavar="SECONDS",
        help="to wait for the others [30]",
    )


FEATURE = Feature(
    Command(
        name="doctor",
        help="find problems that keep a run from starting, on or between machines",
        run="toolkit.features.doctor.command:run",
        add_arguments=_add_arguments,
        description="Checks the driver, torch, GPUs, shared memory and disk of this machine. With "
        "--main_process_ip, typed on each machine, also the network between them. It takes "
        "seconds.",
        epilog="Exit codes: 0 nothing failed, 1 something did, 130 interrupted.",
        relaunches=False,
    )
)
