"""Traces: records, trees, advantages, packing, and what is refused."""

import base64
import hashlib
import io
import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxlc.config import Config, defaults, load
from jaxlc.core.errors import UserError
from jaxlc.data.sequences.loader import array_dtypes
from jaxlc.data.sequences.user_batches import EndOfBatches, complete_batch
from jaxlc.data.texts.records import BadRecord, Record
from jaxlc.data.tokens.encoder import Encoder
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.posttrain.records import Trace, TraceReader
from jaxlc.posttrain.rollouts import RolloutSequences, write_rollouts
from jaxlc.posttrain.traces import Traces, open_traces, with_reference
from jaxlc.posttrain.trees import labeled_steps

PROMPT = [1, 2, 3, 4, 5]
ROLLOUTS = dict(data=dict(traces=""), posttrain=dict(loss="grpo"))


def answer(tokens: list[int], prompt: list[int] = PROMPT, **fields) -> dict:
    return dict(tokens=prompt + tokens, loss_mask=[0] * len(prompt) + [1] * len(tokens), **fields)


def opened(
    directory: Path, records: list[dict], suffix=".jsonl", seq_len=32, step=None, **sections
) -> tuple[Traces, Config]:
    path = directory / f"traces{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    config = defaults()
    config.data.update(traces=str(path), seq_len=seq_len, eval_fraction=1e-9)
    config.attention.shared_prefixes = True
    for section, values in sections.items():
        config[section].update(values)
    config = load(config)
    return open_traces(config, ByteTokenizer(), (str(path),), step=step), config


def as_batch(row) -> dict[str, np.ndarray]:
    """A row as a batch of the caller, whose prefix_ids name the last prefix only; of one level."""
    return {name: x[None] for name, x in row.items()} | dict(prefix_ids=row["prefix_ids"].T)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_group_is_one_tree(tmp_path, suffix):
    """A branch starts with a copy of the last prompt token, so an answer of n tokens is a branch of
    n tokens.
    """
    records = [answer([6, 7, 8], reward=1.0), answer([9], reward=0.0), answer([6, 7], reward=0.5)]
    traces, config = opened(tmp_path, records, suffix, posttrain=dict(loss="grpo"))
    row = traces.train[0]
    np.testing.assert_array_equal(row["tokens"][:11], [1, 2, 3, 4, 5, 6, 7, 5, 5, 6, 0])
    np.testing.assert_array_equal(row["targets"][:11], [2, 3, 4, 5, 6, 7, 8, 9, 6, 7, 0])
    np.testing.assert_array_equal(row["loss_weights"][:11], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(row["segment_ids"][:11], [1, 1, 1, 1, 2, 2, 2, 3, 4, 4, 0])
    np.testing.assert_array_equal(row["prefix_ids"][:11, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(row["positions"][:11], [0, 1, 2, 3, 4, 5, 6, 4, 4, 5, 0])
    np.testing.assert_allclose(row["answer_weights"][4:10], [1 / 3] * 3 + [1] + [1 / 2] * 2)
    deviation = np.std([1, 0, 0.5], ddof=1) + 1e-4
    np.testing.assert_allclose(
        row["advantages"][[4, 7, 8]], np.array([0.5, -0.5, 0]) / deviation, rtol=1e-6
    )
    completed = complete_batch(as_batch(row), (1, 32), 257, "test", array_dtypes(config))
    row["targets"] = np.where(row["loss_weights"] > 0, row["targets"], 0)
    for name, x in completed.items():
        np.testing.assert_array_equal(x[0], row[name])


def test_labeled_answers_have_the_mismatched_answers_of_their_step(tmp_path):
    """The answer of the trace before, in steps of two sequences; the last step has two traces.

    A prompt is a number p, twice; its answer has p tokens p + 20.
    """
    records = [answer([p + 20] * p, [p, p], label=p % 2 == 0) for p in range(3, 10)]
    sizes = dict(seq_len=24, train=dict(global_batch_size=2))
    traces, config = opened(tmp_path, records, posttrain=dict(loss="kto"), **sizes)
    steps = []
    for step in range(traces.train.num_sequences // 2):
        answers = {}
        for row in (traces.train[2 * step], traces.train[2 * step + 1]):
            for segment in np.unique(row["segment_ids"])[1:]:
                tokens = row["segment_ids"] == segment
                if row["answer_weights"][tokens].any():
                    prompt, weight = int(row["tokens"][tokens][0]), row["loss_weights"][tokens]
                    values = row["targets"][tokens] - 20, row["advantages"][tokens]
                    ids, labels = (np.unique(x).tolist() for x in values)
                    is_matched = bool(weight.any())
                    assert weight.all() == is_matched
                    assert labels == [(1 - 2 * (prompt % 2)) * is_matched]
                    answers.setdefault(prompt, {})[is_matched] = ids
        assert all(x[True] == [prompt] for prompt, x in answers.items())
        steps.append({prompt: x[False][0] for prompt, x in answers.items()})
    assert sorted(sum(map(list, steps), [])) == list(range(3, 10)) and len(steps) > 1
    for others in steps:  # one cycle over all traces of the step
        start = prompt = next(iter(others))
        cycle = [prompt]
        while (prompt := others[prompt]) != start:
            cycle.append(prompt)
        assert sorted(cycle) == sorted(others) and len(cycle) > 1
    # a step has all its sequences, also where few are filled
    few, _ = opened(tmp_path, records, posttrain=dict(loss="kto"), **sizes | dict(seq_len=512))
    assert few.train.num_sequences == 2
    with pytest.raises(UserError, match="needs two answers in a step"):
        opened(tmp_path, records, posttrain=dict(loss="kto"), seq_len=12, train=dict(global_batch_size=1))  # fmt: skip


def test_step_of_labeled_answers_has_as_many_sequences_where_fewer_answers_need_more():
    """Six answers and their mismatched ones fit into five sequences. The last step needs two
    answers, so the first one would have five, which do not fit.
    """
    sizes = [(4, 2), (1, 1), (3, 4), (4, 5), (3, 5), (2, 2), (2, 1)]
    labeled = [
        Trace(
            where=f"trace {number}",
            tokens=np.repeat(np.int32([number, number + 20]), (num_prompt, num_answer)),
            in_loss=np.repeat([False, True], (num_prompt, num_answer)),
            prompt=bytes([number]),
            advantage=1.0,
        )
        for number, (num_prompt, num_answer) in enumerate(sizes)
    ]
    sequences = labeled_steps(labeled, 12, 5, levels=0)
    steps = [sum(sequences[first : first + 5], []) for first in (0, 5)]
    assert len(sequences) == 10
    for trees in steps:
        matched = [bool(trace.where) for tree in trees for trace in tree.traces]
        assert 2 * sum(matched) == len(matched) >= 4


def with_teacher(tokens, log_probs, **fields) -> dict:
    values = dict(teacher_tokens=tokens, teacher_log_probs=log_probs, teacher_tokenizer="bytes")
    return answer([6, 7], **values | fields)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_teacher_is_read_with_its_tokens(tmp_path, suffix):
    """Two of three candidates, in any order; lists in JSON, .npy files in Parquet."""
    tokens, log_probs = [[8, 9, 6], [1, 7, 2]], [[-3.0, -2.0, -1.0], [-0.5, -2.5, -2.0]]
    if suffix == ".parquet":
        tokens, log_probs = npy(np.array(tokens)), npy(np.float16(log_probs))
    record, settings = with_teacher(tokens, log_probs), dict(posttrain=dict(teacher_top_k=2))
    traces, config = opened(tmp_path, [record], suffix, seq_len=8, **settings)
    row = traces.train[0]
    np.testing.assert_array_equal(row["teacher_tokens"][4:6], [[6, 9], [1, 2]])
    np.testing.assert_array_equal(row["teacher_log_probs"][4:6], [[-1, -2], [-0.5, -2]])
    assert (np.delete(row["teacher_tokens"], (4, 5), 0) == -1).all()
    other = dict(
        record,
        teacher_tokens=npy(np.array([[8, 9, 6], [1, 7, 2]])),
        teacher_log_probs=npy(np.float16([[-3, -2, -1.5], [-0.5, -3, -2]])),
    )
    changed, _ = opened(tmp_path, [other], ".parquet", seq_len=8, **settings)
    assert changed.fingerprint != traces.fingerprint
    completed = complete_batch(as_batch(row), (1, 8), 257, "test", array_dtypes(config))
    np.testing.assert_array_equal(completed["teacher_tokens"][0], row["teacher_tokens"])


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(teacher_tokenizer="x"), "fingerprint 'bytes': .* needs equal vocabularies"),
        (dict(teacher_tokens=[[8], [1]]), r"int64\[2, 1\], expected integers \[2, 2\]"),
        (dict(teacher_tokens=[[8, 9]]), r"expected integers \[2, 2\]"),
        (dict(teacher_tokens=[[8, 999], [1, 2]]), "token 999"),
        (dict(teacher_tokens="eA=="), "teacher_tokens is no array"),
        (dict(teacher_log_probs=[[-0.1, -0.1], [-1, -2]]), "are not the logarithms"),
        (dict(teacher_tokens=[[8, 9], [1, 1]]), "names a token twice"),
    ],
    ids=str,
)
def test_invalid_teacher_raises(tmp_path, fields, message):
    record = with_teacher([[8, 9], [1, 2]], [[-1, -2], [-1, -2]], **fields)
    with pytest.raises(UserError, match=message):
        opened(tmp_path, [record], posttrain=dict(teacher_top_k=2))


@pytest.mark.parametrize(
    "loss, recorded, sections, meaning",
    [
        ("dpo", True, dict(lora=dict(rank=2)), "record"),
        ("dpo", False, dict(lora=dict(rank=2)), "base"),
        ("kto", True, dict(lora=dict(rank=2)), "base"),
        ("dpo", False, dict(posttrain=dict(reference_model="x")), "model"),
        ("dpo", False, {}, "record"),
    ],
)
def test_reference_auto_means_the_first_that_exists(tmp_path, loss, recorded, sections, meaning):
    config = defaults()
    pair = dict(prompt="ab", chosen="c", rejected="d")
    values = dict(chosen=[-1, -1], rejected=[-1, -1])
    last = pair | (dict(reference_log_probs=values) if recorded else {})
    for name, record in (("a.jsonl", pair), ("b.jsonl", last)):
        (tmp_path / name).write_text(json.dumps(record))
    config.data.traces = str(tmp_path / "*.jsonl")
    config.attention.shared_prefixes = 1
    for section, fields in dict(sections, train=dict(trainable=())).items():
        config[section].update(fields)
    config.posttrain.loss = loss
    assert with_reference(load(config)).posttrain.reference == meaning


def test_groups_that_do_not_fit_repeat_their_prefix(tmp_path):
    records = [
        answer([6] * 10, group="a"),
        answer([7] * 10, group="a"),
        answer([8] * 10, group="a"),
    ]
    traces, _ = opened(tmp_path, records, seq_len=24)
    rows = [traces.train[i] for i in range(2)]
    assert sorted(int(row["loss_weights"].sum()) for row in rows) == [10, 20]
    assert any("repeated" in warning and "fit: 1 (" in warning for warning in traces.warnings)


def test_deeper_trees_lose_the_nodes_that_save_the_fewest_tokens(tmp_path):
    """Shared nodes of 5, 2 and 4 tokens before an answer. An answer that others continue has no node."""
    prompt, deep = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    answers = [[20, 21], [7, 8, 30], [*deep, 40], [*deep, 41], deep]
    records = [answer(tokens, prompt) for tokens in answers]
    for levels, num_tokens, num_nodes in ((3, 16, 7), (2, 18, 6)):
        attention = dict(shared_prefixes=levels)
        traces, _ = opened(tmp_path, records, seq_len=64, attention=attention)
        row = traces.train[0]
        assert (traces.train.num_tokens, row["segment_ids"].max()) == (num_tokens, num_nodes)
        assert (
            row["loss_weights"].sum() == sum(map(len, answers)) and row["loss_segments"].max() == 5
        )
    attention = dict(shared_prefixes=3)
    parts, _ = opened(tmp_path, records, attention=attention, seq_len=18)
    assert parts.train.num_sequences == 1 and not parts.warnings  # 16 tokens, 25 rows
    for few_tokens in (dict(records=records, seq_len=14), dict(records=records * 3, seq_len=18)):
        # too many tokens, or more than 18 x 3 rows
        parts, _ = opened(tmp_path, **few_tokens, attention=attention)
        assert "does not fit: 1 (the first: " in parts.warnings[-1]
        assert parts.train.num_sequences == 2
        weights = [parts.train[i]["loss_weights"].sum() for i in range(2)]
        assert sum(weights) == sum(sum(x["loss_mask"]) for x in few_tokens["records"])


def test_masked_traces_take_no_weight_of_shared_tokens(tmp_path):
    records = [
        answer([6, 7], reward=0.0),
        answer([6, 8], reward=1.0),
        answer([6, 9], reward=2.0, truncated=True),
    ]
    sections = dict(
        data=dict(shared_tokens="node"),
        attention=dict(shared_prefixes=2),
        posttrain=dict(loss="dapo", mask_truncated=True),
    )
    traces, _ = opened(tmp_path, records, **sections)
    row = traces.train[0]
    targets = row["targets"][row["loss_tokens"]]
    weights = [row["loss_weights"][targets == token].sum() for token in (6, 7, 8, 9)]
    assert weights == [1, 1, 1, 0]


def test_contexts_of_a_trajectory_share_reward_and_advantage(tmp_path):
    """The group counts a trajectory once, and its contexts may have other prompts."""
    later = [9, 2, 3]
    records = [
        answer([6], group=0, trajectory="a", reward=1.0),
        answer([7, 8], later, group=0, trajectory="a"),
        answer([6, 7], group=0, trajectory="b", reward=0.0),
        answer([8], group=0, reward=0.5),
    ]
    for levels in (0, 1, 3):
        attention = dict(shared_prefixes=levels)
        traces, _ = opened(tmp_path, records, posttrain=dict(loss="grpo"), attention=attention)
        assert traces.rewards["reward"] == 0.5
        got = [trace.advantage for trace in traces.train.traces]
        np.testing.assert_allclose(sorted(got), np.array([-0.5, 0, 0.5, 0.5]) / 0.5001, rtol=1e-6)
        row = traces.train[0]
        assert sorted(row["tokens"][row["positions"] == 0])[-1] == 9
        assert traces.train.num_tokens == {0: 20, 1: 12, 3: 11}[levels]
    for changed, message in (
        ([records[0] | dict(reward=2.0)], "reward 2.0 of trajectory 'a', which has 1.0 in"),
        ([answer([6], trajectory="c", reward=1.0)], "a trajectory without a group"),
        ([answer([6], later, group=0, reward=1.0)], "or the field trajectory"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, records + changed, posttrain=dict(loss="grpo"))


def test_answers_without_sharing_are_separate_rows(tmp_path):
    traces, _ = opened(
        tmp_path, [answer([6, 7]), answer([8])], attention=dict(shared_prefixes=False)
    )
    row = traces.train[0]
    assert (
        row["segment_ids"].max() == 2 and "prefix_ids" not in row and row["loss_weights"].sum() == 3
    )


def test_pairs_and_chats_are_trees(tmp_path):
    chat = [{"role": "user", "content": "Why?"}]
    pair = dict(
        prompt=chat,
        chosen=[{"role": "assistant", "content": "So."}],
        rejected=[{"role": "assistant", "content": "No!"}],
        reference_log_probs=dict(chosen=[-1.0] * 13, rejected=[-2.0] * 13),
    )
    traces, _ = opened(
        tmp_path, [pair], seq_len=128, data=dict(chat_template="chatml"), posttrain=dict(loss="dpo")
    )
    row = traces.train[0]
    targets = bytes(row["targets"][row["advantages"] * row["loss_weights"] > 0].tolist())
    assert targets == b"So.<|im_end|>" and row["prefix_ids"].max() == 1
    assert set(row["reference_log_probs"][row["loss_weights"] > 0].tolist()) == {-1.0, -2.0}


def test_truncated_answers_are_masked_and_counted(tmp_path):
    records = [answer([6, 7], reward=1.0, truncated=True), answer([8], reward=0.0)]
    traces, _ = opened(tmp_path, records, posttrain=dict(loss="grpo", mask_truncated=True))
    row = traces.train[0]
    assert row["loss_weights"].sum() == 1 and row["answer_weights"].sum() == 2


def test_equal_rewards_have_no_advantage(tmp_path):
    """Also if the mean of equal numbers is rounded."""
    traces, _ = opened(
        tmp_path,
        [answer([i], reward=0.1) for i in range(3)],
        posttrain=dict(loss="grpo", no_advantage="keep"),
    )
    assert (traces.train[0]["advantages"] == 0).all() and traces.rewards["no_advantage"] == 1


def test_groups_without_advantage_are_counted_and_not_packed(tmp_path):
    """Data without such groups has the fingerprint of data that keeps them."""
    settings, keep = dict(loss="grpo"), dict(loss="grpo", no_advantage="keep")
    groups = {"a": (0.0, 1.0), "b": (0.5, 0.5), "c": (1.0, 2.0)}
    records = [
        answer([number], reward=reward, group=group)
        for group, rewards in groups.items()
        for number, reward in enumerate(rewards, 60)
    ]
    dropped, kept = (
        opened(tmp_path, records, posttrain=posttrain)[0] for posttrain in (settings, keep)
    )
    assert [trace.group for trace in dropped.train.traces] == ["a", "a", "c", "c"]
    assert len(kept.train.traces) == 6 and dropped.fingerprint != kept.fingerprint
    counts = {name: dropped.rewards[name] for name in ("no_advantage_groups", "too_old", "reward")}
    assert counts == dict(no_advantage_groups=1, too_old=0, reward=kept.rewards["reward"])
    both = (opened(tmp_path, records[:2], posttrain=x)[0] for x in (settings, keep))
    assert len({traces.fingerprint for traces in both}) == 1


def test_old_traces_of_rollouts_are_counted_and_left_out(tmp_path):
    """Also before advantages are computed. A step without an advantage has sequences of padding."""
    records = [
        answer([60 + age], reward=float(age), policy_step=9 - age, group="a") for age in range(4)
    ]
    rollouts = dict(source="files", max_policy_age=2)
    sections = dict(data=dict(traces=""), posttrain=dict(loss="grpo"), rollouts=rollouts)
    traces = opened(tmp_path, records, step=10, **sections)[0]
    assert [trace.policy_step for trace in traces.train.traces] == [9, 8, 7]
    assert [trace.advantage for trace in traces.train.traces][1] == 0
    names = dict(too_old=1, policy_age=1, policy_age_max=2)
    assert {name: traces.rewards[name] for name in names} == names
    empty = opened(tmp_path, records[:1], step=10, **sections)[0]
    assert empty.train.num_sequences == 0 and empty.rewards["no_advantage_groups"] == 1
    assert empty.details()[1] == "loss       0 of 0 tokens (0.0%)"
    for rows, step, message in (
        (records, 20, "max_policy_age=2"),
        ([answer([6], reward=1.0)], 10, "no policy_step"),
        (records, 9, ":1: policy_step is 9, and rollouts of step 9 are by the weights"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, rows, step=step, **sections)


def test_first_token_has_no_log_prob(tmp_path):
    record = dict(tokens=[1, 2, 3], loss_mask=[1, 1, 1], old_log_probs=[-1.0, -2.0])
    traces, _ = opened(
        tmp_path,
        [record | dict(advantage=1.0)],
        posttrain=dict(loss="grpo", old_log_probs="record"),
    )
    assert traces.train[0]["old_log_probs"][:3].tolist() == [-1, -2, 0]


def test_three_log_probs_are_separate_arrays(tmp_path):
    values = dict(sampled_log_probs=[-1.0, -2.0], old_log_probs=[-1.5, -2.5])
    settings = dict(loss="grpo", old_log_probs="record", importance_weights=True)
    traces, _ = opened(tmp_path, [answer([6, 7], advantage=1.0, **values)], posttrain=settings)
    for name, numbers in values.items():
        row = traces.train[0]
        assert row[name][row["loss_weights"] > 0].tolist() == numbers


def test_pairs_that_do_not_fit_are_dropped(tmp_path):
    """Together, or one of its answers."""
    lengths = [(9, 9), (3, 60), (20, 20)]
    pairs = [dict(prompt="a b c", chosen="y" * a, rejected="n" * b) for a, b in lengths]
    pairs = [
        pair
        | dict(
            reference_log_probs={name: [-1.0] * len(pair[name]) for name in ("chosen", "rejected")}
        )
        for pair in pairs
    ]
    traces, _ = opened(
        tmp_path, pairs, data=dict(overlong_traces="drop"), posttrain=dict(loss="dpo")
    )
    assert len(traces.train.traces) == 2 and "dropped: 2 (the first: " in traces.warnings[-1]


def test_rollouts_of_steps_are_waited_for(tmp_path):
    """Only the step that is needed has a limit of time; a step may be read after later ones."""
    config = defaults()
    config.data.update(sources=(), seq_len=32, prefetch_steps=1)
    config.train.global_batch_size = 2
    config.posttrain.loss = "grpo"
    config.rollouts.update(source="files", wait_seconds=0.2)
    lines: list[str] = []
    config = load(config)
    sequences = RolloutSequences(tmp_path, config, ByteTokenizer(), lines.append)
    for step in range(1, 7):
        sequences.path(step).write_text(
            "".join(json.dumps(answer([6] * step, reward=i)) + "\n" for i in range(2))
        )
        assert sequences[2 * step - 2]["loss_weights"].sum() == 2 * step
    assert (
        sequences[0]["loss_weights"].sum() == 2
        and not sequences[1]["segment_ids"].any()
        and not lines
    )
    digest = hashlib.sha256(sequences.path(1).read_bytes()).hexdigest()
    sequences.check_digests({"1": digest, "9": digest})
    with pytest.raises(UserError, match="on other rollouts of step 2"):
        sequences.check_digests({"2": digest})
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(lambda: sequences[12])
        with pytest.raises(FutureTimeout):
            waiting.result(timeout=0.6)
        sequences.need(7)
        with pytest.raises(UserError, match="no rollouts of step 7 after 0 s"):
            waiting.result()
        sequences.close()
        with pytest.raises(EndOfBatches):
            thread.submit(lambda: sequences[14]).result()


def test_some_rollouts_are_decoded(tmp_path):
    """Every third of 20, with the reward of the same record."""
    config = defaults()
    config.data.update(sources=(), seq_len=32)
    config.posttrain.loss = "grpo"
    config.rollouts.source = "files"
    config.train.global_batch_size = 4
    sequences = RolloutSequences(tmp_path, load(config), ByteTokenizer(), print)
    records = [answer([*b"no.", 256], [*b"Is "], group=i % 4, reward=i) for i in range(20)]
    write_rollouts(records, sequences.path(1))
    decoded = sequences.decoded(1)
    assert all(
        record["text"] == dict(prompt="Is ", answer="no.") and not record["truncated"]
        for record in decoded
    )
    in_order = [i for group in range(4) for i in range(group, 20, 4)]
    assert [(record["reward"], record["group"]) for record in decoded] == [
        (i, str(i % 4)) for i in in_order[::3]
    ]


def test_groups_are_held_out_whole(tmp_path):
    prompts = [[number, 50, 51] for number in range(40)]
    records = [answer([60 + i], prompt, group=str(prompt)) for prompt in prompts for i in range(2)]
    traces, _ = opened(tmp_path, records, seq_len=1024, data=dict(eval_fraction=0.3))
    train, heldout = (
        {*row["tokens"][row["positions"] == 0]} for row in (traces.train[0], traces.heldout[0])
    )
    assert len(heldout) > 1 and train & heldout <= {0}  # padding, and the prompt that starts with 0


@pytest.mark.parametrize(
    "records, sections, message",
    [
        ([answer([6])], dict(posttrain=dict(loss="grpo")), "neither reward nor advantage"),
        (
            [answer([6] * 40)],
            {},
            "longer than config.data.seq_len=32; increase it, or set config.data.overlong_traces",
        ),
        ([dict(text="a")], {}, r"no trace \(the fields are text\)"),
        ([dict(tokens=[1, 2], loss_mask=[1])], {}, "expected a loss_mask of 2 numbers 0 or 1"),
        ([dict(tokens=[1, 999], loss_mask=[0, 1])], {}, "token 999, expected 0 to 511"),
        ([dict(tokens=[-7, 2], loss_mask=[0, 1])], {}, "token -7, expected 0 to 511"),
        ([dict(tokens=[[1], [2, 3]], loss_mask=[0, 1])], {}, "tokens is a list, expected"),
        ([dict(tokens=[1, 2], loss_mask=[0, 0])], {}, "no token is in the loss"),
        (
            [answer([6], advantage=1.0, reference_log_probs=[-1])] * 2,
            dict(posttrain=dict(loss="dpo")),
            "needs chosen and rejected answers",
        ),
        ([answer([6])], dict(posttrain=dict(loss="kto")), "no label, which .*'kto' needs"),
        ([answer([6], label="yes")], {}, "label is 'yes', expected true or false"),
        ([answer([6], reward="x")], {}, "reward is 'x', expected a finite number"),
        ([answer([6], old_log_probs=[-1, -2])], {}, "expected 1 numbers in old_log_probs"),
        (
            [answer([6], reward=1.0)],
            dict(posttrain=dict(loss="grpo", old_log_probs="record")),
            "jaxlc logprobs",
        ),
        ([answer([6], reward=1.0)], dict(posttrain=dict(loss="grpo")), "no group .* has an adv"),
        (
            [answer([6], reward=1.0, old_log_probs=[-1])],
            dict(posttrain=dict(loss="grpo", importance_weights=True)),
            "no sampled_log_probs",
        ),
        (
            [answer([6], reward=1.0, old_log_probs=[-1], sampled_log_probs=[-1])] * 2,
            dict(posttrain=dict(loss="grpo", importance_weights=True, old_log_probs="record")),
            "old_log_probs are the sampler's",
        ),
        (
            [dict(prompt="a", chosen="b", rejected="c")],
            dict(posttrain=dict(loss="dpo")),
            "no reference_log_probs",
        ),
    ],
    ids=str,
)
def test_invalid_traces_raise(tmp_path, records, sections, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, records, **sections)


@pytest.mark.parametrize(
    "sections, message",
    [
        (
            dict(posttrain=dict(clip_low=0.1)),
            "posttrain.clip_low=0.1 has no effect without config.posttrain.loss",
        ),
        (
            dict(posttrain=dict(loss="dpo", kl=0.1)),
            "posttrain.kl=0.1 has no effect with config.posttrain.loss='dpo'",
        ),
        (dict(posttrain=dict(loss="grpo", beta=0.2)), "posttrain.beta=0.2 has no effect with"),
        (
            dict(posttrain=dict(loss="grpo"), rollouts=dict(source="files", top_p=0.9)),
            "rollouts.top_p=0.9 has no",
        ),
        (
            dict(ROLLOUTS, rollouts=dict(source="model", answers_per_prompt=1)),
            "use --config.rollouts.answers_per_prompt=2 or more",
        ),
        (
            dict(
                ROLLOUTS,
                posttrain=dict(loss="reverse_kl"),
                rollouts=dict(source="model", max_replacements=2),
            ),
            "max_replacements=2 has no effect without a policy loss that drops groups",
        ),
        (
            dict(
                ROLLOUTS,
                posttrain=dict(loss="grpo", old_log_probs="record"),
                rollouts=dict(source="model"),
            ),
            "has no old_log_probs, only those of the sampler",
        ),
        (
            dict(posttrain=dict(loss="grpo", importance_weights=True, old_log_probs="sampled")),
            "old_log_probs='sampled' makes them equal",
        ),
        (dict(posttrain=dict(loss="grpo", weight_max=2.0)), "weight_max=2.0 has no effect without"),
        (
            dict(posttrain=dict(loss="grpo", importance_weights=True, weight_min=4.0)),
            "weight_min=4 is not less than weight_max=3",
        ),
        (dict(posttrain=dict(loss="grpo", delta=1.1)), "delta=1.1 is not above 1 .*1.28"),
        (dict(posttrain=dict(loss="cispo", delta=4.0)), "delta=4.0 has no effect with"),
        (dict(posttrain=dict(loss="dr_grpo")), "set config.posttrain.max_answer_tokens"),
        (
            dict(posttrain=dict(loss="dpo"), attention=dict(shared_prefixes=False)),
            "shared_prefixes=1",
        ),
        (dict(posttrain=dict(loss="kto", reference="record")), "of the mismatched answers"),
        (
            dict(posttrain=dict(loss="reverse_kl", teacher_top_k=2)),
            "teacher_top_k=2 with .*'reverse_kl': a top-k KL .* has no gradient in expectation",
        ),
        (dict(posttrain=dict(loss="reverse_kl", kl=0.1)), "kl=0.1 has no effect"),
        (dict(posttrain=dict(loss="reverse_kl", no_advantage="keep")), "'keep' has no effect"),
        (dict(posttrain=dict(loss="orpo")), "ORPO is unsupported"),
        (dict(posttrain=dict(loss="simpo", kl=0.1)), "kl=0.1 has no effect"),
        (dict(posttrain=dict(loss="dpo", target_margin=0.1)), "target_margin=0.1 has no effect"),
        (dict(posttrain=dict(loss="dpo", reference="base")), "config.lora.rank is 0"),
        (dict(data=dict(shared_tokens="node")), "shared_tokens='node' has no effect"),
    ],
    ids=str,
)
def test_invalid_settings_raise(tmp_path, sections, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, [answer([6])], **sections)


@pytest.mark.parametrize(("loss", "compares"), [("grpo", True), ("reverse_kl", False)])
def test_only_losses_that_compare_answers_need_two_of_them(tmp_path, loss, compares):
    rollouts = dict(source="model", answers_per_prompt=1)  # without prompts, which is an error too
    with pytest.raises(UserError) as error:
        opened(tmp_path, [], data=dict(traces=""), posttrain=dict(loss=loss), rollouts=rollouts)
    assert ("answers_per_prompt=2 or more" in str(error.value)) is compares


@pytest.mark.parametrize(
    "prefix_ids, message",
    [
        ([0, 0, 9, 9, 0, 0], "no document 9"),
        (
            [0, 0, 1, 1, 2, 2],
            "2 prefixes before document 3, expected at most 1 .*shared_prefixes=2",
        ),
        ([2, 2, 1, 1, 0, 0], "document 1, which continues 2, in another place"),
        ([0, 0, 0, 0, 1, 1], "document 3, which continues 1, in another place"),
        ([0, 0, 1, 0, 0, 0], "several prefix_ids in one document"),
    ],
)
def test_invalid_prefixes_raise(prefix_ids, message):
    batch = dict(
        tokens=np.ones((1, 6), int),
        segment_ids=np.array([[1, 1, 2, 2, 3, 3]]),
        prefix_ids=[prefix_ids],
    )
    with pytest.raises(UserError, match=message):
        complete_batch(
            batch,
            (1, 6),
            20,
            "batch 3",
            dict.fromkeys([*batch, "targets"], np.dtype("i4"))
            | dict(prefix_ids=np.dtype(("i4", (1,)))),
        )


def test_own_batches_of_deep_trees_have_rows_of_the_loss():
    """By default, one for each token; weights are 1 for the rows that have a segment."""
    i4, f4 = np.dtype("i4"), np.dtype("f4")
    dtypes = dict.fromkeys(("tokens", "segment_ids", "targets"), i4)
    for names, dtype in (
        (("loss_weights", "answer_weights"), f4),
        (("loss_tokens", "loss_segments", "prefix_ids"), i4),
    ):
        dtypes |= dict.fromkeys(names, np.dtype((dtype, (2,))))
    segments, parents = np.array([[1, 1, 2, 3, 3, 0]]), np.array([[0, 0, 1, 2, 2, 0]])
    batch = dict(tokens=np.ones((1, 6), int), segment_ids=segments, prefix_ids=parents)
    own = complete_batch(batch, (1, 6), 20, "batch 3", dtypes)
    assert own["loss_tokens"][..., 0].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert (own["loss_segments"][..., 0] == segments).all() and own["loss_weights"].sum() == 2
    assert not own["loss_segments"][..., 1].any() and not own["loss_weights"][..., 1].any()
    tokens, rows = [1, 2, 1, 2, 3, 3, *[0] * 6], [1, 1, 2, 2, 2, 3, *[0] * 6]
    batch |= dict(loss_tokens=np.array(tokens).reshape(1, 6, 2), targets=np.full((1, 6), 7))
    with pytest.raises(UserError, match="loss_tokens together with loss_segments"):
        complete_batch(batch, (1, 6), 20, "batch 3", dtypes)
    batch |= dict(loss_segments=np.array(rows).reshape(1, 6, 2))
    own = complete_batch(batch, (1, 6), 20, "batch 3", dtypes)
    assert (own["loss_weights"] == (batch["loss_segments"] > 0)).all()
    assert (own["targets"] == 7).all()
    weights = [1 / 2] * 2 + [1 / 3] * 3 + [1] + [0] * 6
    np.testing.assert_allclose(own["answer_weights"].ravel(), weights)
    # more answers than tokens
    answers = np.arange(1, 13).reshape(1, 6, 2)
    own = complete_batch(batch | dict(loss_segments=answers), (1, 6), 20, "batch 3", dtypes)
    assert (own["answer_weights"] == 1).all()
    wrong = (
        dict(loss_tokens=np.full((1, 6, 2), 6)),
        dict(loss_segments=answers + 1),
        dict(loss_weights=np.ones((1, 6))),
    )
    messages = (
        "loss token 6, expected 0 to 5",
        "loss segment 13, expected 0 to 12",
        r"expected float32\[1, 6, 2\]",
    )
    for arrays, message in zip(wrong, messages):
        with pytest.raises(UserError, match=message):
            complete_batch(batch | arrays, (1, 6), 20, "b", dtypes)


def test_reader_of_a_bad_record_names_it():
    with pytest.raises(BadRecord, match="file:3"):
        list(TraceReader(Encoder(ByteTokenizer()), 257).read(Record("file:3", 3, dict(prompt="a"))))


REPLAY = dict(
    model=dict(
        num_layers=3,
        first_layer_kinds=("dense",),
        layer_kinds=("full",),
        kinds=dict(dense=dict(feed_forward="dense")),
        experts=dict(num_experts=8, experts_per_token=2, ffn_dim=8),
    ),
    posttrain=dict(loss="grpo", replay_routing=True),
)


def experts_of(num_tokens: int, num_layers=2, num_chosen=2, seed=0) -> np.ndarray:
    """Distinct experts of all tokens but the last."""
    rng = np.random.default_rng(seed)
    shape = num_tokens - 1, num_layers
    return rng.permuted(np.broadcast_to(np.arange(8), (*shape, 8)), axis=-1)[..., :num_chosen]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


ALL_LAYERS = experts_of(7, num_layers=3)  # the first one is dense
ROUTED = ALL_LAYERS[:, 1:]
FORMS = {
    # of the class GenerateResponseChoice of vLLM 0.22: base64 text of a .npy file
    "vllm uint8": dict(routed_experts=text(npy(ALL_LAYERS.astype(np.uint8)))),
    "vllm uint16": dict(routed_experts=text(npy(ROUTED.astype(np.uint16)))),
    # of the class CompletionOutput of vLLM 0.12: an int16 array
    "vllm int16": dict(routed_experts=text(npy(ROUTED.astype(np.int16)))),
    # of SGLang's meta_info: base64 text of int32 without a header
    "sglang": dict(routed_experts=text(ALL_LAYERS.astype(np.int32).tobytes())),
    "sglang uint8": dict(
        routed_experts=text(ROUTED.astype(np.uint8).tobytes()), routed_experts_dtype="uint8"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_recorded_experts_of_samplers_have_one_form(tmp_path, form):
    traces, config = opened(tmp_path, [answer([6, 7], advantage=1.0, **FORMS[form])], **REPLAY)
    row = traces.train[0]
    assert row["experts"].dtype == np.uint8 and row["experts"].shape == (32, 2, 2)
    np.testing.assert_array_equal(row["experts"][:6], ROUTED)
    assert (row["experts"][6:] == 255).all()
    completed = complete_batch(
        as_batch(row),
        (1, 32),
        257,
        "test",
        array_dtypes(config),
        num_experts=8,
    )
    np.testing.assert_array_equal(completed["experts"][0], row["experts"])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_recorded_experts_move_with_the_tokens_of_a_tree(tmp_path, suffix):
    """The prefix has those of the first answer, and the share that differs is a metric. -1, and
    tokens before the first row, have no record.
    """
    first, second = experts_of(8), experts_of(6, seed=1)
    second[:3] = first[:3]
    rows = npy(first.astype(np.int16)), npy(np.r_[second[2:4], np.full((1, 2, 2), -1)])
    if suffix == ".jsonl":
        rows = map(text, rows)
    records = [answer([6, 7, 8], reward=1.0), answer([9], reward=0.0)]
    records = [dict(x, routed_experts=value) for x, value in zip(records, rows)]
    records[0]["routed_experts_start_len"], records[1]["routed_experts_start_len"] = 0, 2
    traces, _ = opened(tmp_path, records, suffix, **REPLAY)
    row = traces.train[0]
    np.testing.assert_array_equal(row["tokens"][:9], [1, 2, 3, 4, 5, 6, 7, 5, 0])
    np.testing.assert_array_equal(row["experts"][:7], first)
    assert (row["experts"][7:] == 255).all()
    # of 4 tokens, 2 have no record in the second answer, and one has other experts
    assert traces.rewards["experts_differ"] == 3 / 4
    assert traces.traces[0].cut(3).recorded["experts"].shape == (3, 2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no routed_experts"),
        (dict(routed_experts=ROUTED.tolist()), "routed_experts is a list, expected the bytes of a .npy"),
        (dict(routed_experts=text(npy(ROUTED[1:]))), r"int64\[5, 2, 2\], expected integers \[6, 2 or 3, 2\]"),
        (dict(routed_experts=text(npy(ROUTED[:, :1]))), r"int64\[6, 1, 2\]"),
        (dict(routed_experts=text(npy(ROUTED[..., :1]))), r"int64\[6, 2, 1\]"),
        (dict(routed_experts=text(npy(ROUTED[0]))), r"int64\[2, 2\]"),
        (dict(routed_experts=text(npy(ROUTED / 2))), r"float64\[6, 2, 2\]"),
        (dict(routed_experts=text(npy(ROUTED + 1))), "routed_experts of .*: expert 8, expected 0 to 7"),
        (dict(routed_experts=text(npy(ROUTED - 9))), "expert -"),
        (dict(routed_experts="a text"), "is no array"),
        (dict(routed_experts=text(npy(ROUTED)), routed_experts_start_len="1"), "expected an integer"),
        (dict(routed_experts=text(npy(experts_of(9))), routed_experts_start_len=-2), "from 0 to 6"),
        (dict(routed_experts=text(npy(np.full((6, 2, 2), 127, "i1")))), "expert 127, expected 0"),
        (dict(routed_experts=text(npy(ROUTED).replace(b"(6, 2, 2), }   ", b"(10000000000,)}"))), "is no array"),
        (dict(routed_experts=text(npy(ROUTED).replace(b"(6, 2, 2), }", b"(((((((((((("))), "is no array"),
        (dict(routed_experts=text(npy(ROUTED)), truncated="no"), "truncated is 'no', expected true"),
        (dict(routed_experts=text(npy(ROUTED)), reward=10**400), "reward is 1.*, expected a finite"),
        (dict(routed_experts=text(npy(np.array([None])))), "is no array"),
        (dict(routed_experts=text(ROUTED.astype("i4").tobytes()[4:])), r"int32\[23\], expected integers \[6"),
        (dict(routed_experts=text(b""), routed_experts_dtype="int3"), "is no array"),
    ],
)  # fmt: skip
def test_experts_of_another_model_or_of_other_tokens_raise(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        opened(tmp_path, [answer([6, 7], **dict(reward=1.0) | fields)], **REPLAY)


def test_own_batches_with_wrong_experts_raise():
    dtype = np.dtype((np.uint8, (2, 2)))
    dtypes = array_dtypes(load(defaults())) | dict(experts=dtype)
    batch = dict(tokens=np.ones((1, 3), int), experts=np.zeros((1, 3, 2, 2), np.uint8))
    for experts, message in (
        (batch["experts"] + np.uint8(8), "expert 8, expected 0 to 7"),
        (batch["experts"].astype(int), r"experts is int64\[1, 3, 2, 2\], expected uint8"),
        (
            batch["experts"][..., :1],
            r"experts is uint8\[1, 3, 2, 1\], expected uint8\[1, 3, 2, 2\]",
        ),
    ):
        with pytest.raises(UserError, match=message):
            complete_batch(
                batch | dict(experts=experts), (1, 3), 20, "batch 3", dtypes, num_experts=8
            )
    with pytest.raises(UserError, match=r"no experts, .*pass uint8\[B, S, 2, 2\]"):
        complete_batch(dict(tokens=batch["tokens"]), (1, 3), 20, "batch 3", dtypes, num_experts=8)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(posttrain=dict(loss="grpo", replay_routing=True)), "needs a model with experts"),
        (REPLAY | dict(posttrain=dict(loss="dpo", replay_routing=True)), "has no effect"),
        (
            REPLAY | dict(posttrain=dict(replay_routing=True)),
            "has no effect without config.posttrain",
        ),
    ],
)
def test_replay_without_effect_raises(tmp_path, sections, message):
    with pytest.raises(UserError, match=f"replay_routing=True {message}"):
        opened(tmp_path, [answer([6, 7], reward=1.0)], **sections)
