import { Queue, Worker, createPostgresBackend, runMigrations } from 'bullmq';
import pg from 'pg';
import { count } from './count.mjs';
import { defaultJobOptions, processorOf, producerOf } from './bull.mjs';

const QUEUE = 'bench';
const NOBODYS_QUEUE = 'nobody';
const POOL = 16;

const CONCURRENCY = { throughput: 16, async: 200, large: 16, latency: 16 };

export const adapter = {
  about: {
    title: 'BullMQ on PostgreSQL',
    package: 'bullmq',
    settings: [
      'createPostgresBackend, concurrency 16 (200 for work5), pool of 16 connections, removeOnComplete',
      'added by add and addBulk over a pool of as many connections as callers',
    ],
    contract: [
      'A job is deleted when it has completed: no history.',
      'A stalled job may run twice; its lock is checked when it completes.',
    ],
    recovery: {
      seconds: 60,
      source: 'lockDuration 30 s, then the next check for stalled jobs, every stalledInterval 30 s: 30 to 60 s',
    },
  },

  async setup(url) {
    const client = new pg.Client({ connectionString: url });
    await client.connect();
    await runMigrations(client);
    await client.end();
  },

  async producer(url, callers) {
    const options = { connection: { connectionString: url, max: callers }, defaultJobOptions };
    const queue = new Queue(QUEUE, options, createPostgresBackend);
    const other = new Queue(NOBODYS_QUEUE, options, createPostgresBackend);
    return producerOf(queue, other);
  },

  async worker(url, { mode }, onJob) {
    const worker = new Worker(
      QUEUE,
      processorOf(onJob),
      { connection: { connectionString: url, max: POOL }, concurrency: CONCURRENCY[mode] },
      createPostgresBackend,
    );
    await worker.waitUntilReady();
    return { stop: () => worker.close(true) };
  },

  remaining: (url) =>
    count(url, `SELECT count(*) FROM bullmq.job WHERE queue = '${QUEUE}' AND state IN ('waiting', 'active')`),
};
