# Spark with the pandas backend: notebooks, tests, the demo. Build from the repository's root:
#   docker build -f docker/cpu.Dockerfile -t gpu-join:cpu .
#   docker run --rm gpu-join:cpu gpu-join demo
FROM python:3.12.12-slim-bookworm

# Spark 4.2 runs on Java 17; procps is what Spark's scripts call for `ps`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*

# the jars of Delta, Kafka and Postgres, as the tests of services have them; Docker takes no file with another checksum
ADD --checksum=sha256:27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead --chmod=644 \
    https://repo1.maven.org/maven2/io/delta/delta-spark_4.2_2.13/4.4.0/delta-spark_4.2_2.13-4.4.0.jar \
    /opt/jars/
ADD --checksum=sha256:c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc --chmod=644 \
    https://repo1.maven.org/maven2/io/delta/delta-storage/4.4.0/delta-storage-4.4.0.jar \
    /opt/jars/
ADD --checksum=sha256:64539c45e5d39f7ddb747312c239f38f5208d08c1a0ddf7d70beb2fbd9373705 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/spark/spark-sql-kafka-0-10_2.13/4.2.0/spark-sql-kafka-0-10_2.13-4.2.0.jar \
    /opt/jars/
ADD --checksum=sha256:f2be3b76f9e6cbe63379d4e4e0dc14f59dbf056ae2ad16ff15ac108004c86767 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/spark/spark-token-provider-kafka-0-10_2.13/4.0.0/spark-token-provider-kafka-0-10_2.13-4.0.0.jar \
    /opt/jars/
ADD --checksum=sha256:7568b998572d256f0b7bc0afdc1b7a2588b8b08415c62ce314c864a6851ae9d9 --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/kafka/kafka-clients/3.9.1/kafka-clients-3.9.1.jar \
    /opt/jars/
ADD --checksum=sha256:6d3bd18df8410f3e31b031aca582cc109342358a62a2759ebd0c4cdf30d06f8b --chmod=644 \
    https://repo1.maven.org/maven2/org/apache/commons/commons-pool2/2.12.0/commons-pool2-2.12.0.jar \
    /opt/jars/
ADD --checksum=sha256:188976721ead8e8627eb6d8389d500dccc0c9bebd885268a3047180274a6031e --chmod=644 \
    https://repo1.maven.org/maven2/org/postgresql/postgresql/42.7.4/postgresql-42.7.4.jar \
    /opt/jars/

RUN useradd --create-home --uid 1000 joiner && install -d -o joiner /home/joiner/state
WORKDIR /home/joiner/gpu-join
COPY --chown=joiner . .
# the project's own extras carry its pins
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[demo,notebooks,metrics,delta,iceberg,kafka]' 'pyspark==4.2.0' 'pandas==2.3.3' 'pyarrow==26.0.1' \
    && mv /opt/jars/*.jar "$(python -c 'import pyspark; print(pyspark.__path__[0])')/jars/"

USER 1000
ENV PYTHONUNBUFFERED=1
EXPOSE 4040 8888
# one micro-batch through the engine
HEALTHCHECK --interval=1m --timeout=30s CMD ["gpu-join", "health"]
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "notebooks"]
