# SPDX-License-Identifier: Apache-2.0
"""A connector that reports failed loads block by block, on a model with four KV cache groups."""

from tests.patches.lab import Lab, LabConnector, conclude, error_of, near, prompt, same

SYMPTOM = "RuntimeError: A KV connector reported block-level load failures; the engine is dead"


def main() -> None:
    lab = Lab()
    tokens, other = prompt(1344, seed=1), prompt(40, seed=2)
    cold = lab.run(tokens)[0]
    LabConnector.stores = False
    LabConnector.answer = lambda *_: (0, False)
    lab.reset()
    together, beside = lab.run(tokens, other)
    LabConnector.answer = None
    seen: dict[str, dict] = {}
    right = lambda request_id: "right"  # noqa: E731

    def failing(name: str, index: int, asynchronous: bool, policy: str = "recompute") -> str:
        """One run in which the ``index``-th real block of each load is reported, and nonsense with it."""
        lab.reset()
        lab.scheduler.recompute_kv_load_failures = policy == "recompute"
        LabConnector.asynchronous = asynchronous
        LabConnector.load = lambda request_id: "noise"

        def bad_blocks(loads: list[tuple[list[int], ...]]) -> set[int]:
            real = [[block for ids in groups for block in ids if block] for groups in loads]
            return {blocks[index] for blocks in real} | ({0, -5, 10**9} if real else set())

        LabConnector.bad_blocks = bad_blocks
        error = error_of(lambda: seen.update(zip([name, f"{name} beside"], lab.run(tokens, other), strict=True)))
        LabConnector.bad_blocks, LabConnector.load = None, right
        if not error:
            LabConnector.answer = lambda *_: (0, False)
            seen[f"{name} again"] = lab.run(tokens)[0]
            LabConnector.answer = None
        return error

    errors = [failing("attention", 0, True)]
    if not errors[0]:
        errors += [failing("last", -1, True), failing("at once", 0, False), failing("last at once", -1, False)]
        tries = len(LabConnector.attempts)
        failed = [failing("failed", 0, True, "fail"), failing("failed at once", 0, False, "fail")]
        reasons = [seen.pop("failed")["reason"], seen.pop("failed at once")["reason"]]
        wrong = [name for name, answer in seen.items() if "again" in name and not same(answer, cold)]
        wrong += [name for name, answer in seen.items() if "beside" in name and not near(answer, beside)]
        wrong += [name for name in ("attention", "last", "at once", "last at once") if not near(seen[name], together)]
        lab.reset()
        restored = lab.run(tokens)[0]
        healthy = (
            not any(errors + failed)
            and tries == 12
            and reasons == ["error", "error"]
            and not wrong
            and same(restored, cold)
            and restored["cached"] > 1000
        )
        conclude(False, healthy, errors=errors, tries=tries, reasons=reasons, wrong=wrong)
    else:
        conclude(errors[0].startswith("RuntimeError: A KV connector reported block-level"), False, errors=errors)


if __name__ == "__main__":
    main()
