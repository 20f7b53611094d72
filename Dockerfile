# The GPU path with pinned versions: the wheels of torch and triton bring their own CUDA 13.0 libraries; the host's driver
# must be of version 580 or newer.
#   docker build -t hybrid-distill .
#   docker run --rm --gpus all -v "$PWD:/work" hybrid-distill run llama_1b --dry-run
# Training needs shared memory, for data workers and NCCL; launch/README.md has the whole command:
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 -v "$PWD:/work" ...
# For flash-attn, mamba-ssm or DeepSpeed, which compile against CUDA, begin from an image with nvcc.
FROM python:3.12-slim-bookworm

ENV HF_HOME=/work/.cache PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# Triton compiles its launchers with the C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

RUN pip install torch==2.13.0

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY hybrid_distill hybrid_distill
COPY kernels kernels
COPY recipes recipes
RUN pip install --constraint constraints.txt '.[eval,finetune,plot,sweep,track]' && hybrid-distill recipes

COPY launch /opt/launch
WORKDIR /work
ENTRYPOINT ["hybrid-distill"]
CMD ["--help"]
