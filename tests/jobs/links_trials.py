"""A rank that surveys the links of its job repeatedly, to compare the results."""

from __future__ import annotations

import argparse

import torch.distributed as dist

from ddpcheck.links.measure import SurveyOptions, survey


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    for number in range(options.times):
        report = survey(SurveyOptions(seconds=options.seconds), "cpu")
        if dist.get_rank() == 0:
            result = "; ".join(one.sentence() for one in report.explanations) or "nothing"
            print(f"trial {number}: {report.looks} measurements, {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
