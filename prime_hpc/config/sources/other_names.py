"""Names that other suites give to what a key here says: so that an unknown key is answered with the one that is meant.

TRL (1.16), verl (0.9), OpenRLHF (0.11), transformers' trainer and the reference pages of PRIME-RL. An answer names our
keys in angle brackets; a key is shown as a flag where a flag was typed. `tools/keys` makes a table of it.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache

from prime_hpc.config.sources.other_learning_names import OF_LEARNING

_EPOCHS = "epochs of SFT are <sft.data.num_epochs>; RL counts steps, <max_steps>"
_STEP_SIZE = (
    "state the samples of a whole step, over all ranks: <orchestrator.batch_size>, <sft.data.batch_size>; "
    "<trainer.micro_batch_tokens> says how many tokens are computed at once, and a step takes as many as it needs"
)
_STAGES = (
    "stages of an engine find each other by themselves: one command (or one job) starts them all, on one machine; "
    "<inference.pipeline_parallel_size> says how many, <inference.data_parallel_size> how many engines on more machines"
)
_EXTRAS = "the trainer's W&B run gets numbers alone; samples and distributions are the orchestrator's"
_SHARES = (
    "shares of the entries of <sft.data.path> are <sft.data.probabilities>; those of environments are `ratio` in "
    "<orchestrator.env>"
)
_NODES = (
    "ranks and engines are counted, and take a GPU each: <trainer.num_ranks>, <inference.data_parallel_size>; nodes of "
    "a job follow, or are <slurm.trainer.nodes>, <slurm.inference.nodes>, with <slurm.gpus_per_node>"
)
_TASKS = (
    "tasks of RL are an environment's, <orchestrator.env>: `rows` reads files and data sets of the hub; rows of SFT "
    "are files (<sft.data.path>) or a data set (<sft.data.name>)"
)
_REWARDS = (
    "rewards are the environment's, <orchestrator.env>: `rows` takes reward functions of your own, as TRL and verl "
    "call them (its arguments `reward`, `weights`); else a verifiers package brings them"
)
_SHARDED = "FSDP2 shards always: <trainer.parallel.dp_shard>, <trainer.parallel.dp_replicate>"
_QUANTISED = "weights that train are not quantised: <model.lora>, <model.dtype>, <model.fp8>"

_ANYWHERE: tuple[tuple[str, str], ...] = (
    (
        "num_generations n_samples_per_prompt num_samples_per_prompt rollout.n rollout_n num_return_sequences "
        "group_size sampling.n",
        "replies to a prompt: <orchestrator.rollouts_per_example>",
    ),
    (
        "train_batch_size rollout_batch_size rollout.batch_size gen_batch_size vllm_generate_batch_size",
        "samples a step, replies and not prompts: <orchestrator.batch_size> (as many prompts as it holds "
        "<orchestrator.rollouts_per_example>); rows of SFT: <sft.data.batch_size>",
    ),
    (
        "gradient_accumulation_steps per_device_train_batch_size per_device_batch_size micro_train_batch_size "
        "train.micro_batch_size train.batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "micro_batch_size_per_gpu micro_rollout_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu",
        _STEP_SIZE,
    ),
    (
        "ppo_mini_batch_size mini_batch_size generation_batch_size steps_per_generation num_mini_batches",
        "a batch (<orchestrator.batch_size>) is one optimizer step; to take several, state how many parts it has, and "
        "not their size: <trainer.num_mini_batches>; passes over it are <trainer.epochs_per_batch>",
    ),
    (
        "num_iterations ppo_epochs num_ppo_epochs",
        "passes over a batch: <trainer.epochs_per_batch>; its parts, each an optimizer step: "
        "<trainer.num_mini_batches>",
    ),
    (
        "ppo_max_token_len_per_gpu max_tokens_per_gpu max_token_len_per_gpu log_prob_max_token_len_per_gpu",
        "tokens of a micro-batch of one rank: <trainer.micro_batch_tokens>",
    ),
    (
        "packing padding_free packing_samples use_remove_padding use_dynamic_bsz dynamic_batch_enable packing_strategy",
        "samples are packed as a rule: <trainer.rows> of RL, <sft.data.pack> of SFT",
    ),
    (
        "max_completion_length max_response_length response_length max_new_tokens generate_max_len "
        "max_completion_tokens",
        "tokens of a reply: <orchestrator.sampling.max_tokens>; of prompt and replies together: <seq_len>",
    ),
    (
        "max_prompt_length prompt_max_len prompt_length",
        "a prompt is not cut: with its replies it has <seq_len> tokens at most",
    ),
    (
        "max_length max_seq_length max_len model_max_length cutoff_len model.seq_len data.seq_len",
        "the longest sample, in tokens, is <seq_len>",
    ),
    ("truncation truncation_mode", "samples of SFT that are too long: <sft.data.overlong>"),
    *OF_LEARNING,
    (
        "reward_funcs reward_fn reward_function reward_model reward_manager reward_kwargs remote_rm_url "
        "reward.remote_url custom_reward_function reward_weights reward_pretrain agent_func_path",
        _REWARDS,
    ),
    (
        "train_files val_files prompt_data prompt_dataset train_dataset eval_dataset dataset train_data_path",
        _TASKS,
    ),
    (
        "sampling.stop sampling.stop_strings sampling.stop_sequences stop_strings stop_sequences",
        "texts that end a reply: <orchestrator.sampling.extra>, {stop: [TEXT]}",
    ),
    (
        "extra_body reasoning_effort",
        "other parameters of a request: <orchestrator.sampling.extra>, of an evaluation <eval.sampling.extra>",
    ),
    (
        "val_split val_size val_ratio validation_split test_size eval_split_ratio",
        "held-out rows are files of their own: <sft.eval.path>",
    ),
    ("dataset_name", "a data set of the hub is <sft.data.name>, files are <sft.data.path>"),
    ("dataset_config dataset_config_name", "it is <sft.data.subset>"),
    ("dataset_train_split prompt_split", "it is <sft.data.split>"),
    (
        "messages_key prompt_key label_key input_key output_key dataset_text_field",
        "the data's own names of its columns: <sft.data.columns>",
    ),
    ("assistant_only_loss completion_only_loss train_on_inputs train_on_prompt", "it is <sft.data.loss_roles>"),
    ("chat_template_path apply_chat_template", "it is <sft.data.chat_template>"),
    ("dataset_num_proc dataloader_num_workers", "it is <sft.data.num_workers>"),
    ("prompt_probs dataset_mixer interleave_probs", _SHARES),
    (
        "model_name_or_path model_name_path pretrain pretrained_model_name_or_path base_model model.path model_id",
        "a directory or a name of the hub: <model.name>",
    ),
    ("torch_dtype bf16 fp16 model_dtype param_dtype mixed_precision", "it is <model.dtype>"),
    (
        "model.vlm freeze_vision_encoder vision_encoder_attr language_model_attr",
        "images are <model.vision>: `frozen` or `trained`; where the parts of the model are is known",
    ),
    ("wandb.mode wandb_mode", "it is <wandb.offline>"),
    ("attn_implementation flash_attn use_flash_attn flash_attention", "it is <model.attn>"),
    (
        "model.impl model_impl load_using_meta moe_use_grouped_mm",
        "there is one implementation of a model, transformers' modules with kernels of this trainer in them "
        "(<model.attn>, <model.fused_head>): leave it out",
    ),
    (
        "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_enable activation_checkpointing",
        "it is <model.ac>, every <model.ac.freq>-th block",
    ),
    ("activation_offloading enable_activation_offload", "it is <model.ac.offload>"),
    ("torch_compile use_torch_compile", "it is <model.compile>"),
    ("use_liger_kernel use_liger use_fused_kernels", "kernels of the head are <model.fused_head>"),
    ("cast_lm_head_to_fp32", "`float32`: <model.head_dtype>"),
    ("use_peft", "adapters are trained with <model.lora>, of <model.lora.rank>"),
    ("lora_r lora_rank lora.r", "it is <model.lora.rank>"),
    ("lora_alpha", "it is <model.lora.alpha>"),
    ("lora_target_modules", "it is <model.lora.target_modules>"),
    ("use_rslora", "it is <model.lora.rslora>"),
    ("lora_dropout lora.dropout", "adapters have no dropout: engines, which sample with them, have none. Leave it out"),
    (
        "lora_name enable_lora max_loras max_lora_rank",
        "engines serve the adapters that <model.lora> trains: leave it out",
    ),
    ("use_dora", "adapters are plain or rank-stabilised: <model.lora.rslora>"),
    ("load_in_4bit load_in_8bit quantization_config bnb_4bit_quant_type", _QUANTISED),
    ("deepspeed zero_stage fsdp fsdp_config fsdp_size ds.zpg accelerate_config", _SHARDED),
    (
        "optimizer_offload adam_offload param_offload cpu_offload offload_policy",
        "the optimizer's state: <trainer.optim.offload>; activations: <model.ac.offload>",
    ),
    (
        "ulysses_sequence_parallel_size ring_attn_size sequence_parallel_size context_parallel_size sp_size cp_size",
        "it is <trainer.parallel.cp>",
    ),
    ("expert_model_parallel_size expert_parallel_size ep_size", "it is <trainer.parallel.ep>"),
    (
        "tensor_model_parallel_size vllm_tensor_parallel_size vllm.tensor_parallel_size",
        "of an engine: <inference.tensor_parallel_size>; of the trainer: <trainer.parallel.tp>",
    ),
    (
        "inference.tp inference.parallel",
        "GPUs of an engine: <inference.tensor_parallel_size>; engines: <inference.data_parallel_size>",
    ),
    (
        "deployment num_train_gpus num_infer_gpus",
        "GPUs of the trainer: <trainer.num_ranks>; engines: <inference.data_parallel_size>; nodes: "
        "<slurm.trainer.nodes>, <slurm.inference.nodes>",
    ),
    ("weight_broadcast weight_sync", "how versions get to the engines: <weights.transport>"),
    ("orchestrator.buffer", "which tasks come, and which groups count: <orchestrator.curriculum>"),
    ("oversampling_factor", "episodes in flight: <orchestrator.max_concurrent>"),
    ("vllm_num_engines vllm.num_engines num_inference_engines", "it is <inference.data_parallel_size>"),
    (
        "vllm_gpu_memory_utilization vllm.gpu_memory_utilization rollout.gpu_memory_utilization",
        "it is <inference.gpu_memory_utilization>",
    ),
    ("vllm_max_model_length", "it is <inference.max_model_len>"),
    ("api_server_count", "more HTTP servers, each with engines of its own: <inference.num_replicas>"),
    (
        "tool_call_parser enable_auto_tool_choice reasoning_parser",
        "a run reads calls and think sections from the tokens themselves (<model.renderer>); for others who ask the "
        "server it is an argument below <inference.vllm>",
    ),
    ("vllm_enable_sleep vllm_enable_sleep_mode free_cache_engine enable_sleep", "it is <inference.sleep>"),
    (
        "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port rollout.name",
        "engines are started with <inference.data_parallel_size>; those that run already are "
        "<orchestrator.client.base_url>",
    ),
    (
        "colocate_all colocate_all_models colocate_actor_ref hybrid_engine",
        "the same numbers in <inference_gpu_ids> and <trainer_gpu_ids>, with <inference.sleep>",
    ),
    (
        "n_gpus_per_node num_gpus_per_node nnodes num_nodes num_processes num_machines n_gpus slurm.nodes slurm.gpus "
        "slurm.ntasks",
        _NODES,
    ),
    (
        "slurm.modules slurm.conda slurm.venv slurm.pre_run_command",
        "lines of shell before anything starts: <slurm.setup>",
    ),
    ("slurm.requeue", "it is <slurm.restart.how>"),
    (
        "epochs max_epochs num_epochs num_train_epochs total_epochs num_episodes",
        _EPOCHS,
    ),
    ("total_training_steps max_train_steps num_train_steps total_steps", "it is <max_steps>"),
    ("save_freq save_steps checkpoint_interval", "it is <ckpt.interval>"),
    (
        "save_total_limit max_ckpt_num ckpt.max_num max_actor_ckpt_to_keep",
        "it is <ckpt.keep_last>",
    ),
    (
        "resume_mode resume_from_checkpoint resume_from_path resume_from load_checkpoint ckpt.load_enable "
        "resume resume.step resume.dir",
        "`latest`, a step or a path: <ckpt.resume_step>; a run of yours goes on by `prime-hpc resume NAME`",
    ),
    (
        "test_freq eval_steps eval_freq eval_strategy val_before_train do_eval",
        "it is <orchestrator.eval.interval>, of SFT <sft.eval.interval>; the start and the end are measured as well",
    ),
    ("val_kwargs", "it is <orchestrator.eval.sampling>"),
    (
        "num_generations_eval eval_n_samples_per_prompt eval.n_samples_per_prompt",
        "it is <orchestrator.eval.rollouts_per_example>",
    ),
    ("run_name experiment_name exp_name wandb_run_name", "it is <name>"),
    ("project_name wandb_project", "it is <wandb.project>"),
    (
        "report_to logger use_wandb use_tensorboard",
        "monitors are switched on by name: <wandb>, <tensorboard>, <mlflow>",
    ),
    ("monitor monitors", "it is <wandb>; the runs' ids are <wandb.trainer_id> and <wandb.orchestrator_id>"),
    (
        "log_extras",
        "of the orchestrator's W&B run: <wandb.samples_interval>, <wandb.samples>, <wandb.distributions>",
    ),
    ("log_level", "it is <log.level>"),
    ("logging_steps", "every step is logged; leave it out"),
    ("log_completions num_completions_to_print log_val_generations", "it is <orchestrator.log_samples>"),
    (
        "async_train async_enable async_queue_size staleness_threshold max_off_policy_steps max_staleness "
        "max_head_offpolicyness",
        "how many steps a batch's tokens may be old: <async_level>",
    ),
    ("partial_rollout partial_rollout_enable", "episodes go on over weight updates as a rule: <orchestrator.stale>"),
    (
        "max_assistant_turns max_user_turns max_tool_calling_iterations",
        "turns are limited in an item of <orchestrator.env>: `max_turns`",
    ),
    ("tool_config_path function_tool_path multi_turn", "tools and turns are the environment's: <orchestrator.env>"),
    ("environment", "environments are a list: <orchestrator.env> of RL, <eval.env> of an evaluation"),
    ("environment_args", "they are `args` of the environment's item: <orchestrator.env>, <eval.env>"),
    ("enable_rollout_routing_replay routing_replay", "it is <trainer.router_replay>"),
    ("full_determinism full_determinism_enable", "it is <trainer.deterministic>"),
    ("ddp_timeout nccl_timeout", "seconds: <trainer.dist_timeout_s>"),
    (
        "default_local_dir save_path ckpt_path default_hdfs_dir",
        "the run directory is <output_dir>/<name>; checkpoints alone can be elsewhere: <ckpt.path>",
    ),
    (
        "push_to_hub hub_model_id",
        "nothing is uploaded: a published version (`weights/step_N`) is a directory that Hugging Face loads",
    ),
)
"""Last words of a key there, whatever section they stand in -> what to state here."""

_AS_TYPED: dict[str, str] = {
    "dry_run": "`prime-hpc submit FILE --dry-run` prints the job, `rl @ FILE --dry-run` says what would run here",
    **dict.fromkeys(("config", "config_file", "config_path"), "a config file is given as `@ FILE`"),
    "pp.rank": _STAGES,
    "pp.iroh_seed": _STAGES,
    "pp.iroh_peer_id": _STAGES,
    **{
        f"trainer.wandb.log_extras.{extra}": f"{_EXTRAS}: <wandb.{key}>"
        for extra, key in (("interval", "samples_interval"), ("samples",) * 2, ("distributions",) * 2)
    },
    **dict.fromkeys(
        ("data.micro_batch_size", "micro_batch_size", "orchestrator.micro_batch_size", "trainer.micro_batch_size"),
        "micro-batches of RL are counted in tokens, packed: lower <trainer.micro_batch_tokens>; of SFT it is "
        "<sft.data.micro_batch_size>",
    ),
    **dict.fromkeys(
        ("orchestrator.eval.environment_ids", "orchestrator.eval.benchmarks"),
        "beside training they are a list of items, each with its `id`: <orchestrator.eval.env>",
    ),
    "train.micro_bs": (
        "micro-batches are counted in tokens: state <trainer.micro_batch_tokens>, micro_bs times seq_len at most"
    ),
    "sft.data.fake": "`fake` is a value of <sft.data.type>; of what shape: <sft.data.batch_size>, <sft.data.seq_len>",
    **dict.fromkeys(("data.mixture", "data.probabilities", "data.weights"), _SHARES),
    "data.num_workers": "batches of RL come packed from the orchestrator; of SFT it is <sft.data.num_workers>",
    "batch_size": (
        "state <orchestrator.batch_size> (samples a step, of RL), <sft.data.batch_size>, or how many requests are in "
        "flight: <orchestrator.max_concurrent>, <synthesize.max_concurrent>"
    ),
}
"""Keys as a whole, which have another meaning in other sections -> what to state here."""

_OF_ROWS = {
    "files",
    "dataset",
    "subset",
    "dataset_split",
    "prompt",
    "answer",
    "question",
    "instructions",
    "reward",
    "weights",
}
"""Arguments of the environment `rows`, which are easily stated beside its id."""

_KEY = re.compile(r"<([a-z_0-9.]+)>")


@cache
def _by_name() -> dict[str, str]:
    return {name: answer for names, answer in _ANYWHERE for name in names.split()}


def instead_of(path: Sequence[str], *, is_flag: bool) -> str | None:
    """Return what is to be stated in the place of a key that does not exist; None: nobody else has it either.
    `path`: of the key as it was typed, in snake case."""
    if path[-1] in _OF_ROWS and list(path[-3:-2]) == ["env"]:
        return f"an environment's own arguments are below `args`: {{id: rows, args: {{{path[-1]}: ...}}}}"
    answer = _AS_TYPED.get(".".join(path))
    names = (".".join(path[begin:]) for begin in range(len(path)))  # the longest that is known
    answer = answer or next((_by_name()[name] for name in names if name in _by_name()), None)
    if answer is None:
        return None
    return _KEY.sub(lambda key: f"--{key[1].replace('_', '-')}" if is_flag else key[1], answer)


def rows() -> Iterator[tuple[list[str], str]]:
    """Yield names there and the answer, our keys in backticks."""
    for names, answer in _ANYWHERE:
        yield names.split(), _KEY.sub(r"`\1`", answer)
