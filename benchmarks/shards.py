"""Compare shards=V with sync=ddp that accumulates gradients over as many passes.

    python benchmarks/shards.py --rounds 3    # as root: hosts are network namespaces

A host is one rank of one thread. A round measures both settings of each case, in turns.
"""

import argparse
import statistics
import sys

from scaling import Case, measure

BATCHES = {"lenet": 264, "resnet18": 72}
"""Global batches that can be divided by all numbers of shards."""
CASES = [
    *((model, "unshaped", 2, shards) for model in BATCHES for shards in (4, 12)),
    *((model, "1 Gbit/s", hosts, hosts) for model in BATCHES for hosts in (2, 4)),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps of each case")
    parser.add_argument("--model", choices=BATCHES, help="only this model")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.model in (None, case[0])]
    ratios: dict[tuple, list[float]] = {case: [] for case in cases}
    for number in range(arguments.rounds):
        for model, link, hosts, shards in cases:
            batch = f"global_batch_size={BATCHES[model]}"
            settings = {
                "shards": (batch, f"shards={shards}"),
                "ddp": (batch, f"gradient_accumulation_steps={shards // hosts}"),
            }
            rates = {
                name: measure(Case(model, link, hosts), share=arguments.share, words=settings[name])
                for name in sorted(settings, reverse=bool(number % 2))
            }
            ratios[model, link, hosts, shards].append(rates["shards"] / rates["ddp"])
            print(f"round {number + 1}: {model}, {link}, W={hosts}, V={shards}: {rates}")
            sys.stdout.flush()
    print("\n| model | link | W | V | shards / ddp, median (range) |\n|---|---|---|---|---|")
    for (model, link, hosts, shards), found in ratios.items():
        middle = statistics.median(found)
        span = f"{min(found):.2f}–{max(found):.2f}"
        print(f"| {model} | {link} | {hosts} | {shards} | {middle:.2f} ({span}) |")


if __name__ == "__main__":
    main()
