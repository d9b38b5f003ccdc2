# The product's images, one a role: docker build --target operator|agent|engine -t dlo/ROLE .
# Each holds what its role needs and nothing else: no pip, no build tool, and torch in the engine's alone.
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/tools

FROM tools AS wheel
WORKDIR /src
COPY requirements/build.txt requirements/
RUN /opt/tools/bin/pip install --quiet --require-hashes -r requirements/build.txt
COPY . .
# Into an environment of the same place as the packages': laid over them, it adds our own and nothing else.
RUN /opt/tools/bin/python -m hatchling build -t wheel -d /wheel \
 && python3 -m venv --without-pip /opt/dlo \
 && /opt/tools/bin/pip --python /opt/dlo/bin/python install --quiet --no-index --no-deps /wheel/*.whl

FROM tools AS operator-packages
COPY requirements/operator.txt /tmp/requirements.txt
RUN python3 -m venv --without-pip /opt/dlo \
 && /opt/tools/bin/pip --python /opt/dlo/bin/python install --quiet --require-hashes -r /tmp/requirements.txt

FROM tools AS agent-packages
COPY requirements/agent.txt /tmp/requirements.txt
# botocore describes 400 services, 26 MB of them; the agent reads one.
RUN python3 -m venv --without-pip /opt/dlo \
 && /opt/tools/bin/pip --python /opt/dlo/bin/python install --quiet --require-hashes -r /tmp/requirements.txt \
 && find /opt/dlo/lib/python3*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d ! -name s3 -exec rm -r {} +

FROM tools AS engine-packages
COPY requirements/engine.txt /tmp/requirements.txt
RUN python3 -m venv --without-pip /opt/dlo \
 && /opt/tools/bin/pip --python /opt/dlo/bin/python install --quiet --require-hashes -r /tmp/requirements.txt

FROM ${BASE} AS runtime
# A name for the user: libraries ask for it, and there is nothing it may write but what a pod mounts.
RUN echo 'dlo:x:65532:65532::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'dlo:x:65532:' >> /etc/group
ENV PATH=/opt/dlo/bin:$PATH PYTHONUNBUFFERED=1
LABEL org.opencontainers.image.title="DLO Operator" org.opencontainers.image.licenses="Apache-2.0"

FROM runtime AS operator
COPY --from=operator-packages /opt/dlo /opt/dlo
COPY --from=wheel /opt/dlo /opt/dlo
USER 65532:65532
ENTRYPOINT ["dlo-operator"]

FROM runtime AS agent
COPY --from=agent-packages /opt/dlo /opt/dlo
COPY --from=wheel /opt/dlo /opt/dlo
# The source root `samples`, which lies in the wheel: a first deployment works without any other checkpoint.
RUN ln -s "$(python -P -c 'from dlo_cli.samples import samples_root; print(samples_root())')" /opt/dlo/samples
USER 65532:65532
ENTRYPOINT ["dlo-agent"]

FROM runtime AS engine
# Gigabytes that change with the lock file alone, so they are a layer of their own.
COPY --from=engine-packages /opt/dlo /opt/dlo
COPY --from=wheel /opt/dlo /opt/dlo
USER 65532:65532
ENTRYPOINT ["python", "-P", "-m", "dlo_engine"]
