# kvtier on NVIDIA's Triton server. 24.10 is server 2.51, the one that every test runs against.
ARG TRITON=nvcr.io/nvidia/tritonserver:24.10-py3

FROM ${TRITON} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY requirements.lock ./
RUN python3 -m venv /opt/kvtier \
    && /opt/kvtier/bin/pip install --no-cache-dir --constraint requirements.lock \
        cmake nanobind ninja scikit-build-core
COPY pyproject.toml README.md LICENSE ./
COPY kvtier kvtier
RUN /opt/kvtier/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels . \
    && /opt/kvtier/bin/pip uninstall --yes cmake nanobind ninja scikit-build-core \
    && /opt/kvtier/bin/pip install --no-cache-dir --constraint requirements.lock /wheels/kvtier-*.whl "tritonclient[grpc]"

FROM ${TRITON}
RUN useradd --uid 10001 --create-home kvtier && install --directory --owner kvtier --mode 0700 /cache
COPY --from=build /opt/kvtier /opt/kvtier
COPY model_repository /models
RUN chmod -R a-w,a+rX /models
ENV PATH=/opt/kvtier/bin:${PATH}
USER kvtier
WORKDIR /home/kvtier
VOLUME /cache
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/v2/health/ready')"]
# Mount a model folder at /weights. Options after the image's name are added to these.
ENTRYPOINT ["python", "-m", "kvtier.cli.serve", "--model-repository", "/models", "--set", "model=/weights", "--set", "tiers.nvme.path=/cache"]
