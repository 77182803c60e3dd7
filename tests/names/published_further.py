"""More rows of the table of published names: normalisation, resampling, transposed convolution, and some of our own."""

from published import Row

FURTHER = [
    Row(
        "distdl.nn",
        "DistributedBatchNorm",
        "P_x, num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
        "",
        "check_batch_norm check_batch_norm_stores_few_parameters check_a_resnet_trains_like_the_sequential_network",
    ),
    *[
        Row(
            module,
            "DistributedUpsample",
            "P_x, buffer_manager=None, size=None, scale_factor=None, mode='linear', align_corners=False",
            "",
            "check_upsampling",
        )
        for module in ("distdl.nn", "distdl.nn.upsampling")
    ],
    *[
        Row(
            module,
            "Interpolate",
            "x_start, x_stop, x_global_shape, y_start, y_stop, y_global_shape, scale_factor=None, mode='nearest', "
            "align_corners=False",
            "",
            "check_interpolation_of_blocks check_interpolation_stays_within_its_block",
        )
        for module in ("distdl.nn", "distdl.nn.interpolate")
    ],
    *[
        Row(
            "distdl.nn",
            f"DistributedConvTranspose{n}d",
            "P_x, P_y=None, P_w=None, *, in_channels, out_channels, kernel_size, stride=1, padding=0, "
            "output_padding=0, groups=1, bias=True, dilation=1, padding_mode='zeros', buffer_manager=None",
            "weight bias",
            "check_transposed_convolutions",
        )
        for n in (1, 2, 3)
    ],
    Row("distdl.nn.loss", "DistributedLossBase", shown_by="check_losses"),
    Row("distdl.nn.loss", "ZeroVolumeCorrectorFunction"),
    # not upstream's; called as torch's are
    Row("distdl.nn", "DistributedSmoothL1Loss", "P_x, reduction='mean', beta=1.0"),
    Row("distdl.nn", "DistributedHuberLoss", "P_x, reduction='mean', delta=1.0"),
    Row("distdl.nn", "DistributedNLLLoss", "P_x, weight=None, ignore_index=-100, reduction='mean'"),
    Row("distdl.nn", "DistributedDropout", "P_x, p=0.5, inplace=False"),
    Row("distdl.nn", "DistributedEmbedding", "P_x, P_y, P_w, num_embeddings, embedding_dim, padding_idx=None"),
]
