"""The seam: what the core gives to the rooms around it and beside it, name by name.

A change of one of these names is a change of rooms that a plain load and a plain run never open. A
new name is a decision, and it is made here.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.unit.test_house import read_sources

SRC = Path(__file__).parents[2] / "src"
# Beside the core, as the rooms of anyrank/around are around it.
BESIDE = ("memory", "watching", "integrations", "cli", "testing", "__main__")

# Module of the core -> its names that are imported from around it, and from beside it.
SEAM = {
    "checks": """
        check_bool check_choice check_function check_int check_model check_number check_path
        check_type
    """,
    "data.fetch": "FetchedBatch MicrobatchDataset MicrobatchRequest OwnOrder",
    "data.order": "Order",
    "data.receipts": "EpochAccount EpochVerdict Receipt receipt_of",
    "data.schedule": "MicrobatchSlot StepPlan",
    "errors": """
        AnyrankError CheckpointError LoadError RankError RecomputeError UnsafeFile WrongType
        WrongValue
    """,
    "files.block_sums": "BlockDigester BlockSums check_file read_sums sums_name",
    "files.content_hash": "BLOCK_BYTES content_hash hash_of",
    "files.json_codec": "from_json reading_record to_json",
    "files.listing": "Checksum Computed EXTRA_STATE Fetch FileInfo Listing TensorFill ties_of",
    "files.manifest": "FORMAT IMPLEMENTATION MANIFEST Manifest STEP read_manifest step_name",
    "files.pages": "use_large_pages",
    "files.progress": "Progress progress_of_tool",
    "files.reader": "Job Reader copy_into memory_of synchronize",
    "files.segments": "Job jobs_of memory_of",
    "files.storage": """
        LocalStorage OpenFile Storage absolute inside join_path read_exactly read_range
        read_whole reading storage_for storing write_file
    """,
    "files.threads": "spread",
    "filling.fill": "Moved Side fill",
    "filling.headers": "header_reader look_at_source",
    "filling.plan": "Forecast forecast",
    "filling.plan_load": "AgreedPlan plan_load",
    "filling.read": "OwnBytes ProgressTo fill_from_files",
    "filling.reading": "Reading",
    "filling.report": "FillReport LoadReport log_report mib_by_rank",
    "formats": "torch_zip weight_files",
    "formats.dcp_output": "metadata_of",
    "formats.run_log": "END ERROR LOG LogLine SECONDS START read_log",
    "formats.run_step": """
        ASIDE INDEX METADATA SavedStep StepFolder StoredBox check_sizes describe is_step
        list_step list_steps number_of
    """,
    "formats.safetensors": "ALIGN CODES MAX_HEADER_BYTES RESERVED",
    "formats.sources": "Source check_source list_source",
    "formats.part_names": "NESTED is_other_part",
    "formats.tables": "renamer",
    "formats.torch_zip": "ALIGN STORAGES TorchZip tensor_opcodes value_opcodes wrap",
    "formats.weight_files": """
        ENDINGS FILES FORMATS META_PART OF_META ZIP_MAGIC format_of list_file
        saying_what_it_is
    """,
    "model.alike": "Inventory check_alike differing_replicas inventory_of",
    "model.dialects": "Case Dialect LIVE ModelMatch Renamer dialects_of match_of_rules",
    "model.dtensors": "as_sharded placement_of",
    "model.fits": "PACKED SourceMemory check_overlaps shared_on_meta unwritable",
    "model.frozen_parts": "FROZEN FrozenInfo FrozenSource frozen_info frozen_parts",
    "model.match": "match_model warn_of_idle",
    "model.memory_meter": "Meter PeakMemory rss_anon",
    "model.options": "GivenLayout LayoutEntry LoadOptions WAYS_OUT",
    "model.own_code": """
        NOT_RUN OwnCode OwnCodeRun loads_by_own_code own_code_of save_by_own_code
        takes_extra_state
    """,
    "model.plain_copies": "plain_copy",
    "model.replace": "Replacement",
    "model.share": "ModelShare allocate room_for",
    "model.tensors": """
        ModelTensor NamedModule REGISTRIES find_modules find_tensors in_state_dict tensors_of
    """,
    "model.wrappers": "ModelTensor Path Registration plain_class plain_of",
    "random_state.streams": """
        NumpyStream PythonStream Source TorchStream ambient is_in_use kept own_accelerator reseed
    """,
    "resume.listener": "RunListener",
    "resume.options": "Cadence RENAMING ResumeArguments",
    "resume.restore": "restore_state",
    "resume.resume": "restore_newest",
    "resume.search": "Candidate StepOfRun StepSearch",
    "resume.source": "ResumeSource misfit_text",
    "saving.collect": "Snapshot collect",
    "saving.rank_file": "Item make_items write_share",
    "saving.run_folder": "RunFolder",
    "saving.write": "RankShare SaveRecord describe_step write_own_share",
    "settings": "BUFFER_BYTES PEERS_FOLDER TIMEOUT_SEC",
    "state.accelerate_wrappers": "innermost",
    "state.digests": "check_has_memory digests_of",
    "state.optimizer": "Names UNKNOWN match_optimizer",
    "state.part_types": """
        PartMatch PartSource PartState SHOWN differences hold_to_save in_line misfits
        shared_tensors
    """,
    "state.plain_values": "as_json",
    "state.replicas": "differing_tensors",
    "state.resume_report": "Outcome ResumeReport SavedOn",
    "state.script_settings": """
        FUNCTIONS NOT_SETTINGS ScriptSettings Settings is_schedule optimizer_of
    """,
    "state.stateful": """
        BY_GROUP attribute_tensors has_own_methods match_stateful save_stateful
        tensors_now
    """,
    "state.train_state": "TrainState names_of",
    "steps.agreed_batches": "Fetcher",
    "steps.gradient_sync": "GradientSync local used_on_any_rank",
    "steps.loader": "ElasticLoader",
    "steps.norm": "sum_dtype",
    "steps.position": "COUNTS KEPT_RECEIPTS Position",
    "steps.step_listeners": "around_fetches on_step watching_optimizers",
    "steps.step_record": "FROZEN GRADIENT NO_GRADIENT StepRecord",
    "tensors.box": "Box BoxIndex row_major",
    "tensors.flat": "assembled",
    "tensors.hashing": "SPREAD derive mix64 mix64_ signed",
    "tensors.layout": "IntervalShard Layout Piece Placement local_pieces local_shape",
    "tensors.names": """
        PEFT_PREFIX PEFT_SEGMENTS Rename Renaming WRAPPERS candidates is_of_adapter
        is_of_base_layer is_own_factor is_trained_copy match_keys
    """,
    "tensors.plan": "GAP_BYTES Read plan_reads",
    "tensors.sharded_tensor": """
        Coordinates Members ShardedTensor coordinates_of holders is_released replicas
        shared version_of
    """,
    "tensors.spec": "Chunk StoredTensor dtype_name",
    "tensors.torch_classes": "fsdp2_class is_dtensor is_fsdp2",
    "tensors.walk": "walk",
    "tensors.writes": "PIECE_BYTES plan_writes",
    "versions": "TESTED __version__ warn_if_untested",
    "wording": """
        FLOATS count first_few group_by_part in_units join_first listed printable rows
        short_dtype
    """,
    "world.alike": "Values differing digest_of",
    "world.arguments": "compare_arguments",
    "world.connections": "Connections GLOO_SEC",
    "world.device": "boot_id name_device",
    "world.failures": "ranks_by_value",
    "world.group": "Group check_group default_store lacks_group name_ranks",
    "world.helper_thread": "HelperThread",
    "world.pinned": "page_locked",
    "world.ranks": "Interrupted Ranks open_ranks",
    "world.rendezvous": "open_connections",
    "world.store": "Store",
    "world.waits": "GroupState Wait",
}


def is_core(module: str) -> bool:
    """Whether a module is of the core, or of the base that all rooms stand on."""
    return module.startswith("anyrank.") and module.split(".")[1] not in ("around", *BESIDE)


def seam_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module of the core -> its names that other rooms import, anywhere in their text."""
    seam: dict[str, set[str]] = {}
    for module in sources:
        if is_core(module) or module == "anyrank":
            continue
        for node in ast.walk(ast.parse(sources[module])):
            if isinstance(node, ast.ImportFrom) and is_core(node.module or ""):
                seam.setdefault(node.module or "", set()).update(name.name for name in node.names)
    return seam


def differences(seam: dict[str, set[str]]) -> list[str]:
    """Names that are imported and not listed, or listed and not imported."""
    found = {
        f"{module.removeprefix('anyrank.')}: {name}" for module in seam for name in seam[module]
    }
    listed = {f"{module}: {name}" for module, names in SEAM.items() for name in names.split()}
    return [f"not listed: {name}" for name in sorted(found - listed)] + [
        f"no longer used: {name}" for name in sorted(listed - found)
    ]


def test_the_seam_is_what_is_listed() -> None:
    assert differences(seam_of(read_sources(SRC))) == []


def test_a_name_that_is_not_listed_is_found() -> None:
    sources = {
        "anyrank.around.exact.run": "from anyrank.world.ranks import Ranks, secret\n",
        "anyrank.steps.loader": "from anyrank.world.ranks import unseen\n",
    }
    told = differences(seam_of(sources))
    assert "not listed: world.ranks: secret" in told
    assert not [line for line in told if "unseen" in line]
    assert any(line.startswith("no longer used: ") for line in told)
