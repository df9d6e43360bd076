"""Names that other suites give to keys of the optimizer, the losses, the critic and the advantages (`other_names`)."""

OF_LEARNING: tuple[tuple[str, str], ...] = (
    ("learning_rate actor_learning_rate", "it is <trainer.optim.lr>"),
    (
        "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio lr_warmup_steps num_warmup_steps",
        "the warm-up is counted in steps: <trainer.scheduler.warmup_steps>",
    ),
    ("lr_scheduler_type lr_scheduler warmup_style lr_decay_style", "it is <trainer.scheduler.type>"),
    ("max_grad_norm clip_grad grad_clip gradient_clipping", "it is <trainer.optim.max_norm>"),
    ("adam_beta1 adam_beta2 adam_betas", "it is <trainer.optim.betas>"),
    ("adam_epsilon", "it is <trainer.optim.eps>"),
    ("optimizer", "it is <trainer.optim.type>"),
    (
        "beta kl_coef init_kl_coef kl.init_coef kl_loss_coef use_kl_loss kl.use_loss kl_ctrl",
        "a KL penalty is off until <trainer.loss.kl.coef> is stated (<trainer.loss.kl.estimator>: GRPO's is k3)",
    ),
    (
        "kl_loss_type kl_penalty kl_estimator reference_policy_kl_type",
        "k1, k2 or k3 (`low_var_kl`): <trainer.loss.kl.estimator>",
    ),
    (
        "use_unbiased_kl use_bias_correction_kl use_on_policy_kl_approximation",
        "times the ratio to the policy that sampled: <trainer.loss.kl.unbiased>",
    ),
    (
        "use_kl_in_reward kl_in_reward",
        "a KL penalty is in the loss until <trainer.loss.kl.in_rewards> says otherwise, with <trainer.critic.lr> and "
        "what else a critic has",
    ),
    (
        "kl.horizon target_kl kl_horizon kl_target kl_ctrl.type",
        "the weight of a KL penalty in the rewards is controlled with <trainer.loss.kl.target_kl>, in nats a token, "
        "and <trainer.loss.kl.horizon>; else it stays: <trainer.loss.kl.coef>",
    ),
    (
        "topk_logits_k loss_top_k gkd_logits_topk distillation_loss.topk distillation.topk",
        "the teacher's likeliest tokens at each place: <trainer.loss.distillation.top_k>",
    ),
    (
        "kl_type distillation_mode distillation_objective distillation_loss.loss_mode",
        "`forward_kl`, `reverse_kl` or `jsd`: <trainer.loss.distillation.divergence>; of the sampled token alone: "
        "`opd` as <orchestrator.advantage.type>",
    ),
    (
        "mixed_kl_weight",
        "between the two KL divergences lies `jsd`: <trainer.loss.distillation.divergence>, with "
        "<trainer.loss.distillation.beta>",
    ),
    (
        "zero_outside_topk loss_add_tail",
        "tokens that the teacher does not name count as one more, on both sides: leave it out "
        "(<trainer.loss.distillation.top_k>)",
    ),
    (
        "distillation_loss_coef opd_kl_coef distillation_weight",
        "the weight of the divergence: <trainer.loss.distillation.coef>",
    ),
    (
        "use_task_rewards",
        "rewards beside the teacher: any <orchestrator.advantage.type>, or `opd` with "
        "<orchestrator.advantage.reward_weight>",
    ),
    (
        "log_prob_min_clamp loss_max_clamp distillation_loss.clip_log_ratio",
        "a divergence is not clipped, the gradient is: <trainer.optim.max_norm>; one token's log-ratio is: "
        "<orchestrator.advantage.max_gap>",
    ),
    (
        "lmbda seq_kd",
        "the policy samples with `opd`, the teacher with `sft`: <orchestrator.advantage.type>",
    ),
    (
        "use_opd opd_type",
        "`opd` as <orchestrator.advantage.type>; by whole distributions: <trainer.loss.distillation.top_k>",
    ),
    (
        "teacher_model teacher_models teacher_model_name_or_path opd_teacher_load teacher.model_name",
        "the run starts its servers with <teacher_inference>: <orchestrator.teacher.model>",
    ),
    (
        "use_uld_loss use_extended_uld uld_use_hybrid_loss teacher_tokenizer_name_or_path shared_tokenizer "
        "opd_text_splitter",
        "a teacher with another tokenizer reads the same text with `own` as <orchestrator.teacher.tokenizer>; every "
        "token has the gap of the shortest piece of text that ends a token of both",
    ),
    (
        "teacher_model_server_url teacher_model_server use_teacher_server",
        "a teacher that runs already: <orchestrator.teacher.base_url>",
    ),
    (
        "success_reward_threshold",
        "it is <orchestrator.advantage.success_reward>, with `sdpo` as <orchestrator.advantage.type>",
    ),
    (
        "reprompt_template solution_template",
        "a system message shows the rollout that succeeded: <orchestrator.advantage.demonstration_text>",
    ),
    (
        "dro_beta kl_tau",
        "the weight of a squared log-ratio to the policy that sampled: <trainer.loss.kl.coef>, with `behaviour` as "
        "<trainer.loss.kl.target> and `k2` as <trainer.loss.kl.estimator>, which halves the square as `dro_beta` does; "
        "twice a `kl_tau`, which does not",
    ),
    (
        "ref_model sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
        "the reference model stays as it is: <trainer.loss.kl.model>",
    ),
    (
        "epsilon clip_ratio clip_ratio_low eps_clip cliprange eps_clip_low_high ratio_clip_min dppo_mask_low "
        "ipo_threshold",
        "how far the ratio may go: <trainer.loss.clip_low>, <trainer.loss.clip_high>",
    ),
    (
        "epsilon_high clip_ratio_high eps_clip_high eps_clip_higher ratio_clip_max dppo_mask_high",
        "how far the ratio may rise: <trainer.loss.clip_high>",
    ),
    ("clip_ratio_c eps_clip_c c_clip ratio_clip_c", "it is <trainer.loss.dual_clip>"),
    (
        "loss_type loss_mode policy_loss policy_loss_type importance_sampling_level ratio_type use_cispo use_sapo_loss "
        "sequence_level_importance_ratios force_on_policy_ratio disable_ppo_ratio",
        "the objective: <trainer.loss.type>",
    ),
    ("clip_cov_ratio kl_cov_ratio", "the share of tokens of high covariance: <trainer.loss.covariance.share>"),
    ("clip_cov_lb", "it is <trainer.loss.covariance.low>"),
    ("clip_cov_ub", "it is <trainer.loss.covariance.high>"),
    ("ppo_kl_coef", "it is <trainer.loss.covariance.coef>"),
    ("m2_threshold", "it is <trainer.loss.second_moment>"),
    ("sapo_temperature_pos sapo_tau_pos", "it is <trainer.loss.tau_pos>"),
    ("sapo_temperature_neg sapo_tau_neg", "it is <trainer.loss.tau_neg>"),
    ("vespo_k_pos vespo_lambda_pos", "they are the two of <trainer.loss.gamma_pos>"),
    ("vespo_k_neg vespo_lambda_neg", "they are the two of <trainer.loss.gamma_neg>"),
    ("off_policy_mask_threshold use_opsm opsm_delta", "it is <trainer.loss.off_policy_mask>"),
    ("loss_agg_mode loss_scale_factor token_level_loss", "the divisor of a token's loss: <trainer.loss.normalize>"),
    (
        "adv_estimator advantage_estimator advantage.estimator",
        "it is <orchestrator.advantage.type>; the objective is <trainer.loss.type>",
    ),
    (
        "multi_objective_aggregation gdpo_reward_keys gdpo_reward_weights",
        "each reward function normalised by itself is `gdpo`, with their own weights: <orchestrator.advantage.type>, "
        "<orchestrator.advantage.scale>",
    ),
    (
        "scale_rewards norm_adv_by_std_in_grpo no_std_norm normalize_advantages advantage_batch_normalize",
        "`grpo` divides by the group's standard deviation, `dr_grpo` does not: <orchestrator.advantage.type>; by that "
        "of the whole step: <orchestrator.advantage.scale>",
    ),
    (
        "entropy_coef entropy_coeff entropy_loss_coef entropy_bonus ent_coef calculate_entropy",
        "the weight of an entropy bonus: <trainer.loss.entropy.coef> (the metric `entropy` is always there)",
    ),
    (
        "use_adaptive_entropy adaptive_entropy entropy_target target_entropy tgt_entropy",
        "the entropy that the bonus' weight is controlled towards: <trainer.loss.entropy.target>",
    ),
    ("entropy_coef_delta delta_ent_coef", "it is <trainer.loss.entropy.delta>"),
    ("entropy_coef_max max_ent_coef", "it is <trainer.loss.entropy.max_coef>"),
    ("entropy_coef_min min_ent_coef", "the weight of the entropy bonus falls to 0: leave it out"),
    (
        "entropy_checkpointing entropy_from_logits_with_chunking use_entropy_chunking",
        "logits exist a chunk at a time, also for the entropy's gradient: leave it out (<trainer.logits_chunk_tokens>)",
    ),
    (
        "top_entropy_quantile entropy_top_ratio high_entropy_ratio",
        "the share of tokens, those of the highest entropy, that train: <trainer.loss.top_entropy_quantile>",
    ),
    ("gamma", "the discount of a critic's values: <trainer.critic.gamma>"),
    (
        "lam lambd",
        "lambda of the advantages: <trainer.critic.lam>; of what the critic learns: <trainer.critic.critic_lam>",
    ),
    ("critic_learning_rate critic_lr critic.optim.lr", "<trainer.critic.lr>"),
    (
        "critic critic_pretrain critic_load critic_name_or_path value_model value_model_path use_critic",
        "a critic is on where its section is stated, <trainer.critic.warmup_steps> and others, with gae as "
        "<orchestrator.advantage.type>; where its weights begin: <trainer.critic.name>",
    ),
    (
        "critic_warmup num_critic_only_steps freezing_actor_steps",
        "steps in which the critic alone learns: <trainer.critic.warmup_steps>",
    ),
    (
        "value_clip cliprange_value value_clip_range",
        "how far values may move in the updates by a batch: <trainer.critic.value_clip>",
    ),
    (
        "vf_coef value_loss_coef",
        "policy and critic share no weights, so that each has a rate: <trainer.optim.lr> and <trainer.critic.lr>",
    ),
    ("whiten_advantages", "of a critic's: <trainer.critic.whiten>"),
    (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min is_correction_level is_correction_mode "
        "is_correction_threshold rollout_correction rollout_is rollout_is_threshold tis_imp_ratio_cap use_tis tis_clip "
        "tis_clip_low truncated_importance_sampling_type truncated_importance_sampling_ratio use_decoupled_loss "
        "truncated_importance_sampling_ratio_min behave_imp_weight_cap use_importance_sampling_correction",
        "the correction for what engine and trainer compute differently: <trainer.loss.correction.type>, "
        "<trainer.loss.correction.level>, <trainer.loss.correction.high>",
    ),
    ("rollout_is_batch_normalize", "it is <trainer.loss.correction.batch_normalize>"),
    (
        "rollout_rs rollout_rs_threshold rollout_token_veto_threshold rejection_sampling",
        "tokens or sequences outside of bounds are left out with `mask`: <trainer.loss.correction.type>; sequences by "
        "their geometric mean beside it or truncation: <trainer.loss.correction.geometric_low>, "
        "<trainer.loss.correction.geometric_high>, or by k2 or k3 (their mean, sum or greatest): "
        "<trainer.loss.correction.reject>",
    ),
    (
        "mask_truncated_completions overlong_filtering mask_no_eos_with_zero stop_properly_penalty_coef",
        "replies that a limit cut short, `mask` or `penalize`: <orchestrator.advantage.overlong>",
    ),
    (
        "overlong_buffer overlong_buffer_len overlong_buffer_cfg overlong_buffer_length overlong_tokens",
        "it is <orchestrator.advantage.soft_overlong.buffer>",
    ),
    ("overlong_penalty_factor overlong_buffer_penalty", "it is <orchestrator.advantage.soft_overlong.coef>"),
    (
        "reward_clip reward_scaling reward_bias reward.clip_range",
        "rewards are the environment's own, <orchestrator.env>: scale or bound them there",
    ),
    (
        "positive_example_nll_weight",
        "nothing imitates good replies beside RL; imitation alone is <trainer.loss.type> `nll`",
    ),
    (
        "calculate_sum_pi_squared",
        "`optimal_token_baseline` needs no sum over the vocabulary: <orchestrator.advantage.type>",
    ),
    (
        "handle_zero_tail",
        "tokens that no other rollout reaches have advantage 0 with `optimal_token_baseline`: "
        "<orchestrator.advantage.type>",
    ),
    ("filter_zero_advantages", "it is <orchestrator.advantage.zero>"),
    (
        "filter_groups dynamic_filtering dynamic_filtering_enable dynamic_filtering_range dynamic_sampling",
        "groups of equal rewards, or of rewards outside a range, are left out by <orchestrator.curriculum.gates>",
    ),
)
"""As of `other_names`: last words of a key there -> what to state here."""
