"""One example of every message, shown in docs/wire.md and decoded by other programs in tests."""

from __future__ import annotations

from typing import Final

from broker.contract import wire

_TURNS: Final = [
    wire.Turn(
        start=start,
        end=end,
        reward=reward,
        valid=True,
        finish_reason="stop",
        server="rollout-7c1",
        anchor=anchor,
    )
    for start, end, reward, anchor in [(3, 5, 0.0, "S at (0, 0)"), (7, 9, 1.0, "S at (0, 1)")]
]
_EPISODE: Final = wire.Trajectory(
    episode=0,
    token_ids=wire.column([1, 318, 27, 905, 2, 44, 27, 871, 2], "<i4"),
    loss_mask=wire.column([0, 0, 0, 1, 1, 0, 0, 1, 1], "|u1"),
    logprobs=wire.column([0, 0, 0, -0.25, -0.0625, 0, 0, -1.5, -0.125], "<f4"),
    version_runs=wire.column([11, 3, 12, 1], "<i4"),
    turns=_TURNS,
    reward=1.0,
    reward_parts={"env": 1.0},
    success=True,
    end="terminated",
    response="Right",
    metrics={"num_turns": 2.0},
)

_RULES: Final = {
    "steps": 200,
    "groups_per_step": 16,
    "max_staleness": 1,
    "on_late": "wait",
    "seed": 0,
}
_PROBE: Final = wire.Probe(
    token_ids=wire.column([1, 318, 27], "<i4"),
    logprobs=wire.column([-3.5, -0.75], "<f4"),
    tolerance=0.01,
)
_GUIDE: Final = wire.Guide(
    schema='{"type": "object"}', before="<tool_call>\n", after="\n</tool_call>"
)
_KEY: Final = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
_SAMPLING: Final = wire.SamplingParams(
    max_tokens=64, temperature=1.0, top_p=0.95, seed=1234, stop=["</answer>"], guides=[_GUIDE]
)

EXAMPLES: Final[dict[type[wire.Message], wire.Message]] = {
    type(example): example
    for example in (
        wire.Ticket(
            number=417, domain="lake", task_index=208, seed=1_640_531_527, min_version=10,
            max_staleness=1,
            group_size=8, min_group_size=6, deadline_s=600.0,
        ),
        wire.EvalTicket(
            number=3, domain="lake", task_index=2, seed=77, eval_step=20, policy="actor",
            min_version=20, group_size=1,
            temperature=0.0, deadline_s=600.0,
        ),
        wire.Group(
            ticket=417, domain="lake", task_index=208, min_version=10, hub="envhub-2f0",
            deliveries=1, pools=["judge"],
            trajectories=[_EPISODE], prompt="Reach the goal.", generate_s=0.84, env_step_s=0.002,
        ),
        wire.EpisodeScoreRequest(
            ticket=417, domain="lake", task_index=208, episode=0, prompt="Reach the goal.",
            reference="",
            response="Right", reward=1.0, reward_parts={"env": 1.0}, success=True, end="terminated",
            metrics={"num_turns": 2.0}, num_turns=2, num_tokens=4,
        ),
        wire.EpisodeScoreReply(
            rewards="4c1f09b2ad7e6532", scores=[wire.RewardScore(reward="judge", value=0.75,
                notes={"asked": 1.0})],
            reward=1.75, reward_parts={"env": 1.0, "judge": 0.75, "judge/asked": 1.0}, success=True,
        ),
        wire.Closed(
            ticket=418, domain="lake", reason="env_error",
            detail="step() raised ValueError: no such move",
            by="envhub-2f0",
        ),
        wire.RulesChange(epoch=2, rules=_RULES | {"domains": [{"name": "lake"}]}),
        wire.Parted(
            ticket=419, domain="lake", upload="5f1d9c02ab34e678", size=9_437_212,
            part_bytes=1_048_576,
            digest="8c2b41f09ad7e6532f60c1d7be94a058",
        ),
        wire.WeightsOffer(
            epoch=2, version=12, digest="9f86d081884c7d65", plan="60303ae22b998861",
            size_bytes=1_048_576,
            carriers=["shared", "gloo"], probe=_PROBE,
            adapter=wire.Adapter(
                base="b4d2a18c0f7e93d1", targets=["model.layers.*.self_attn.q_proj.weight"],
                rank=16, scale=2.0
            ),
            segment="4711/23/rlearner-weights-9f86d081884c7d65",
        ),
        wire.WeightsJoin(
            server="rollout-7c1", epoch=2, version=12, plan="60303ae22b998861",
            key=_KEY, carriers={"shared": 1, "gloo": 1},
        ),
        wire.WeightsSession(
            session="2-5", rank=3, world_size=3, host="127.0.0.1", port=40123,
            key="JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6", version=12, timeout_s=30.0,
            carrier="shared",
        ),
        wire.GenerateRequest(
            request_id="lake-417-0-1", conversation_id="lake-417-0", token_ids=wire.column([1, 318,
                27], "<i4"),
            sampling=_SAMPLING, min_version=10, deadline_s=60.0, expected_tokens=24,
            expected_high=90, priority=1, step=12,
        ),
        wire.AbortRequest(request_id="lake-417-0-1"),
        wire.GenerateReply(
            request_id="lake-417-0-1", server="rollout-7c1", token_ids=wire.column([905, 2], "<i4"),
            logprobs=wire.column([-0.25, -0.0625], "<f4"), version_runs=wire.column([11, 2], "<i4"),
            finish_reason="stop", policy_version=11, prefix_hit_tokens=2, reshaped=wire.column([1,
                0], "|u1"),
        ),
        wire.LengthRecord(
            domain="lake", estimator="mean", turns=1200, values=wire.column([38.5], "<f4"),
            tasks=wire.column([-559038737], "<i4"), counts=wire.column([8.0], "<f4"),
            means=wire.column([0.25], "<f4"),
        ),
        wire.Metrics(
            role="rollout", id="rollout-7c1", time=1_767_225_600.0,
            values={"perf/tokens_per_s": 4120.5},
            text={"state": "serving"},
            spans=[wire.Span(kind="generate", start=1_767_225_599.0, end=1_767_225_600.0,
                seconds=38.5, count=61)],
        ),
        wire.DeadLetter(
            stream="episodes", sequence=93, ticket=419,
            reason="Group: Object contains unknown field `score`",
            by="rewardhub-a19", data=b"\x81\xa5score\x01",
        ),
        wire.Attempt(deaths=2, hub="envhub-2f0",
            process="7c1e3b9a-4d52/pid:[4026531836]/4711/902166", alone=True),
        wire.DesiredState(state="paused", reason="disk being replaced"),
        wire.OperatorRequest(action="checkpoint"),
        wire.OperatorReply(state="waiting", step=42, detail="it is written when step 42 ends"),
        wire.DeviceLease(
            claims=[
                wire.DeviceClaim(holder="learner-5d1c02", exclusive=True, granted=True, beat=41),
                wire.DeviceClaim(holder="rollout-1-9f86d0", exclusive=False, granted=False, beat=7),
            ]
        ),
        wire.Presence(
            role="rollout", id="rollout-7c1", host="node-3", pid=4711, state="serving",
            engine="hf", channel="zmq",
            address=f"tcp://10.0.0.2:41234 key={_KEY} host=9f86d081884c7d65", epoch=2,
            policy_version=12, slots=64,
            running=41, waiting=3,
            speed=5200.0, idle_ratio=0.0,
            refusal=wire.OfferRefusal(epoch=2, version=13, kind="logprobs",
                difference="token 5 differs", loads=4),
        ),
        wire.RunSpec(
            run="demo", wire_version=wire.WIRE_VERSION, epoch=2, config={"train": {"steps": 200,
                "lr": 1e-6}},
            model_path="runs/demo/warm_start",
            data_digests={"data/train.jsonl": "b94d27b9934d3e08"},
            created=1_767_225_600.0, model_files="60303ae22b998861bce3b28f33eec1be",
        ),
        wire.ModelPart(
            digest="60303ae22b998861bce3b28f33eec1be", part=0, num_parts=1,
            data=bytes.fromhex("789c6b5c9d9c9f979699ae97559c9f7784a9ba160043740749"),
        ),
    )
}  # fmt: skip
