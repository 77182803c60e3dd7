"""The published interface as a table: what can be imported, how it is called, what it has, and which tests show that it
does what it should.

Signatures are written as in a ``lambda``, without ``self``. Behind these parameters there may be more, with defaults.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One published name.

    Attributes:
        module, name: where it is imported from; a method is written ``Class.method``.
        signature: parameters with their defaults; None for what is not called.
        attributes: what its instances have, separated by spaces.
        shown_by: the tests and checks of its behaviour, separated by spaces.
    """

    module: str
    name: str
    signature: str | None = None
    attributes: str = ""
    shown_by: str = ""


_PARTITION = "distdl.backends.mpi.partition"
_STATE = "active rank size shape dim index _comm _group _root"
_DOES_ALL_THE_SAME = (
    "check_shapes_gradients_and_dtypes_on_every_worker check_layers_are_torch_modules "
    "check_layers_check_their_buffer_manager"
)
_MOVES = (
    f"{_DOES_ALL_THE_SAME} check_workers_in_neither_partition_get_a_clone check_errors_are_raised_on_every_worker "
    "check_the_batch_is_preserved_unless_told_otherwise check_dtypes_follow_the_source"
)
_WORKS = f"{_DOES_ALL_THE_SAME} check_optimisers_are_built_everywhere check_empty_blocks_have_full_rank"
_SPREAD = "P_x, P_y, transpose_src=False, transpose_dest=False, preserve_batch=True"
_REPARTITION = "P_x, P_y, preserve_batch=True, buffer_manager=None"
_HALO = "P_x, halo_shape, recv_buffer_shape, send_buffer_shape, buffer_manager=None"
_CONV = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, padding_mode='zeros', dilation=1, groups=1, bias=True"
)
_MIXIN = (
    "x_global_shape, kernel_size, stride, padding, dilation, partition_active, partition_shape, partition_index, "
    "subtensor_shapes=None"
)

PARTITIONS = [
    Row(
        "distdl.backend.backend",
        "Partition",
        shown_by="check_values_are_printed_in_order check_the_example_of_the_docs",
    ),
    *[
        Row(
            _PARTITION,
            kind,
            "comm=COMM_NULL, group=GROUP_NULL, root=None" if kind == "MPIPartition" else None,
            _STATE,
            "check_the_attributes_of_active_and_inactive_partitions check_equality_is_by_value "
            "check_the_world_is_one_duplicate_however_it_is_opened check_an_empty_partition check_a_split_of_the_users "
            "check_children_keep_their_kind_and_mpi_objects check_communicators_are_cached_by_group "
            "check_large_messages_go_in_pieces check_large_strided_messages_are_packed "
            "check_layers_end_on_some_workers_first "
            "check_wrong_arguments_are_refused_everywhere",
        )
        for kind in ("MPIPartition", "MPICartesianPartition")
    ],
    *[
        Row(_PARTITION, f"{kind}.{method}", signature, "", shown_by)
        for kind, method, signature, shown_by in (
            ("MPIPartition", "create_partition_inclusive", "ranks", "check_inclusive_partitions_of_every_kind"),
            (
                "MPIPartition",
                "create_cartesian_topology_partition",
                "shape",
                "check_topologies_are_row_major_and_independent",
            ),
            ("MPIPartition", "deactivate", "", "check_deactivation_in_any_order_with_layers_alive"),
            ("MPIPartition", "create_partition_union", "other", "check_teams_of_broadcasts_and_reductions"),
            (
                "MPIPartition",
                "create_broadcast_partition_to",
                "P, transpose_src=False, transpose_dest=False",
                "check_teams_of_broadcasts_and_reductions",
            ),
            (
                "MPIPartition",
                "create_reduction_partition_to",
                "P, transpose_src=False, transpose_dest=False",
                "check_teams_of_broadcasts_and_reductions",
            ),
            ("MPIPartition", "create_allreduction_partition", "axes", "check_teams_of_broadcasts_and_reductions"),
            ("MPIPartition", "broadcast_data", "data, root=0, P_data=None", "check_values_are_shared"),
            ("MPIPartition", "allgather_data", "data", "check_values_are_shared"),
            ("MPIPartition", "allreduce_data", "data, op='sum'", "check_values_are_shared"),
            ("MPIPartition", "print_sequential", "value", "check_values_are_printed_in_order"),
            ("MPICartesianPartition", "create_cartesian_subtopology_partition", "remain", "check_cartesian_methods"),
            ("MPICartesianPartition", "cartesian_index", "rank", "check_cartesian_methods"),
            ("MPICartesianPartition", "neighbor_ranks", "rank", "check_cartesian_methods"),
        )
    ],
]

BUFFERS = [
    Row("distdl.backends.mpi.buffer", name, signature, attributes, shown_by)
    for name, signature, attributes, shown_by in (
        (
            "MPIExpandableBuffer",
            "dtype, initial_capacity=0",
            "raw_buffer views capacity dtype",
            "test_expandable_buffer",
        ),
        ("MPIExpandableBuffer.expand", "new_capacity", "", "test_expandable_buffer"),
        ("MPIExpandableBuffer.allocate_view", "view_shape", "", "test_expandable_buffer"),
        ("MPIExpandableBuffer.get_view", "view_shape", "", "test_expandable_buffer"),
        ("MPIBufferManager", "", "buffers_map", "test_buffer_manager test_layers_check_their_buffer_manager"),
        ("MPIBufferManager.request_buffers", "num_buffers, dtype", "", "test_buffer_manager"),
    )
]

UTILITIES = [
    Row(f"distdl.utilities.{module}", name, signature, attributes, shown_by)
    for module, name, signature, attributes, shown_by in (
        ("slicing", "compute_subshape", "P_shape, index, shape", "", "test_compute_subshape"),
        ("slicing", "compute_start_index", "P_shape, index, shape", "", "test_blocks_and_their_intersections"),
        ("slicing", "compute_stop_index", "P_shape, index, shape", "", "test_blocks_and_their_intersections"),
        (
            "slicing",
            "compute_intersection",
            "r0_start_index, r0_stop_index, r1_start_index, r1_stop_index",
            "",
            "test_blocks_and_their_intersections",
        ),
        ("slicing", "assemble_slices", "start_index, stop_index", "", "test_slices"),
        ("slicing", "compute_nd_slice_shape", "slices", "", "test_slices"),
        ("slicing", "compute_nd_slice_volume", "slices", "", "test_slices"),
        ("slicing", "range_index", "shape", "", "test_indices_and_filters"),
        ("slicing", "worker_layout", "shape", "", "test_indices_and_filters"),
        ("slicing", "filtered_range_index", "shape, index_filter", "", "test_indices_and_filters"),
        ("slicing", "assemble_index_filter", "index, axes, invert=False", "", "test_indices_and_filters"),
        (
            "slicing",
            "compute_partition_intersection",
            "P_r_shape, r_index, P_s_shape, s_index, x_global_shape",
            "",
            "test_blocks_and_their_intersections",
        ),
        (
            "torch",
            "zero_volume_tensor",
            "b=None, dtype=None, requires_grad=False, device=None",
            "",
            "test_zero_volume_tensor",
        ),
        ("torch", "distdl_padding_to_torch_padding", "pad", "", "test_padding_order"),
        ("torch", "TensorStructure", "tensor=None", "shape dtype requires_grad", "test_tensor_structure"),
        (
            "tensor_decomposition",
            "compute_subtensor_shapes_balanced",
            "global_tensor_structure, P_shape",
            "",
            "test_tensor_decomposition",
        ),
        (
            "tensor_decomposition",
            "compute_subtensor_shapes_unbalanced",
            "local_tensor_structure, P_x, P_y=None",
            "",
            "check_shapes_of_uneven_blocks_are_collected",
        ),
        ("tensor_decomposition", "compute_subtensor_start_indices", "shapes", "", "test_tensor_decomposition"),
        ("tensor_decomposition", "compute_subtensor_stop_indices", "shapes", "", "test_tensor_decomposition"),
        (
            "tensor_decomposition",
            "compute_subtensor_intersection_slice",
            "x_start_index, x_stop_index, y_start_index, y_stop_index",
            "",
            "test_tensor_decomposition",
        ),
        *[
            ("dtype", f"{source}_to_{target}_dtype_dict", None, "", "test_tables_of_dtypes")
            for source in ("numpy", "torch", "intID")
            for target in ("numpy", "torch", "intID")
            if source != target
        ],
        ("index_tricks", "cartesian_index_c", "shape, i", "", "test_indices_and_filters"),
        ("index_tricks", "cartesian_index_f", "shape, i", "", "test_indices_and_filters"),
        ("debug", "print_sequential", "comm, val", "", "check_values_are_printed_in_order"),
    )
]

MOVEMENTS = [
    Row(module, name, signature, attributes, f"{_MOVES} {shown_by}")
    for name, own_module, signature, attributes, shown_by in (
        ("Broadcast", "broadcast", _SPREAD, "", "check_broadcast check_transposed_partitions"),
        ("SumReduce", "sum_reduce", _SPREAD, "", "check_sum_reduce check_transposed_partitions"),
        ("AllSumReduce", "all_sum_reduce", "P_x, axes_reduce=None, axes_keep=None", "", "check_all_sum_reduce"),
        (
            "Repartition",
            "repartition",
            _REPARTITION,
            "P_x_to_y_overlaps P_y_to_x_overlaps",
            "check_repartition check_overlaps_of_a_repartition test_overlaps_of_a_repartition "
            "check_without_grad_the_result_is_a_leaf check_zero_volume_gradients_keep_their_own_shape",
        ),
        ("DistributedTranspose", "transpose", _REPARTITION, "", "test_transpose_is_repartition"),
        (
            "HaloExchange",
            "halo_exchange",
            _HALO,
            "",
            "check_halo_exchange_fills_the_halo_and_writes_nothing",
        ),
        ("AllGather", "all_gather", "P_x, axes", "", "check_all_gather_and_reduce_scatter"),
        ("ReduceScatter", "reduce_scatter", "P_x, axes, sizes=None", "", "check_all_gather_and_reduce_scatter"),
    )
    for module in ("distdl.nn", f"distdl.nn.{own_module}")
]

MIXINS = [
    Row("distdl.nn.mixins.halo_mixin", "HaloMixin"),
    Row("distdl.nn.mixins.conv_mixin", "ConvMixin"),
    Row("distdl.nn.mixins.pooling_mixin", "PoolingMixin"),
    Row(
        "distdl.nn.mixins.halo_mixin",
        "HaloMixin._compute_exchange_info",
        _MIXIN,
        "",
        "test_the_published_example_of_a_halo test_halos_of_every_geometry test_halos_of_blocks_that_are_given "
        "test_halos_where_nothing_is_computed "
        "check_a_convolution_of_the_users_own_from_the_mixins",
    ),
]

_POOL = "P_x, kernel_size, stride=1, padding=0, dilation=1, buffer_manager=None"
_SIZES = (1, 2, 3)
_NETWORKS = "check_lenet_trains_like_the_sequential_network check_a_vgg_trains_like_the_sequential_network"
LAYERS = [
    *[
        Row(module, "DistributedLinear", "P_x, P_y, P_w, in_features, out_features, bias=True", "sublinear",
            f"{_WORKS} check_linear check_numpy_integers_are_sizes")
        for module in ("distdl.nn", "distdl.nn.linear")
    ],
    *[
        Row(module, f"DistributedFeatureConv{n}d", f"P_x, {_CONV}, buffer_manager=None", "weight bias",
            f"{_WORKS} check_feature_convolutions")
        for module in ("distdl.nn", "distdl.nn.conv_feature") for n in _SIZES
    ],
    *[
        Row(module, f"DistributedChannelConv{n}d", f"P_x, P_y, P_w, {_CONV}", "conv_layer stores_bias",
            f"{_WORKS} check_channel_convolutions")
        for module in ("distdl.nn", "distdl.nn.conv_channel") for n in _SIZES
    ],
    *[
        Row(module, f"DistributedGeneralConv{n}d", f"P_x, P_y, P_w, {_CONV}, buffer_manager=None",
            "weight bias stores_bias", f"{_WORKS} check_general_convolutions test_any_overlap_of_sixteen_workers")
        for module in ("distdl.nn", "distdl.nn.conv_general") for n in _SIZES
    ],
    *[
        Row("distdl.nn", f"DistributedConv{n}d", "P_x, P_y=None, P_w=None, buffer_manager=None, **options", "",
            f"check_the_kind_of_convolution {_NETWORKS}")
        for n in _SIZES
    ],
    *[
        Row("distdl.nn", f"Distributed{kind}Pool{n}d", _POOL, "", f"{_WORKS} check_pooling")
        for kind in ("Max", "Avg") for n in _SIZES
    ],
    *[
        Row(module, f"Distributed{kind}Loss", "P_x, reduction='mean'", "_valid_reductions",
            "check_losses check_one_layer_with_and_without_gradients")
        for module in ("distdl.nn", "distdl.nn.loss")
        for kind in ("L1", "MSE", "PoissonNLL", "BCE", "BCEWithLogits", "KLDiv")
    ],
    Row("distdl.nn", "DistributedCrossEntropyLoss",
        "P_x, weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0", "", "check_cross_entropy"),
]  # fmt: skip

MODULES = [
    *[Row("distdl", name) for name in ("nn", "backends", "utilities", "backend")],
    *[Row("distdl.nn", name) for name in ("Module", "mixins", "loss")],
]

ROWS = [*MODULES, *PARTITIONS, *BUFFERS, *UTILITIES, *MOVEMENTS, *MIXINS, *LAYERS]
