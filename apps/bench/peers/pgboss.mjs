import { PgBoss } from 'pg-boss';
import { count, inAYear } from './count.mjs';

const QUEUE = 'bench';
const NOBODYS_QUEUE = 'nobody';

const WORK = {
  throughput: { batchSize: 1000, localConcurrency: 4, burstWhenBatchFull: true },
  async: { batchSize: 50, localConcurrency: 4, burstWhenBatchFull: true },
  large: { batchSize: 50, localConcurrency: 4, burstWhenBatchFull: true },
  latency: { batchSize: 50, localConcurrency: 1, burstWhenBatchFull: true },
};

async function open(url, options) {
  const boss = new PgBoss({ connectionString: url, useListenNotify: true, ...options });
  boss.on('error', (error) => console.error(error.message));
  await boss.start();
  return boss;
}

export const adapter = {
  about: {
    title: 'pg-boss',
    package: 'pg-boss',
    settings: [
      'batchSize 1000, localConcurrency 4, burstWhenBatchFull (work5, payload100k: batchSize 50; latency: batchSize 50, localConcurrency 1), pollingIntervalSeconds 0.5, useListenNotify and notify on',
      'added by send and insert over a pool of as many connections as callers',
    ],
    contract: [
      'The handler is given a batch, which succeeds or fails as a whole.',
      'Completed jobs are kept (7 days by default).',
      'No fence: an expired job that still runs may be completed by either of its workers.',
    ],
    recovery: { seconds: 900, source: 'expireInSeconds, default 15 minutes (heartbeatSeconds is off by default)' },
  },

  async setup(url) {
    const boss = await open(url);
    await boss.createQueue(QUEUE, { notify: true });
    await boss.createQueue(NOBODYS_QUEUE, { notify: true });
    await boss.stop({ graceful: false });
  },

  async producer(url, callers) {
    const boss = await open(url, { max: callers, supervise: false, schedule: false });
    const add = (queue, payloads, more) =>
      boss.insert(
        queue,
        payloads.map((data) => ({ data, ...more })),
      );
    return {
      one: (payload) => boss.send(QUEUE, payload),
      bulk: (payloads) => add(QUEUE, payloads),
      head: (kind, payloads) =>
        kind === 'unhandled' ? add(NOBODYS_QUEUE, payloads) : add(QUEUE, payloads, { startAfter: inAYear() }),
      close: () => boss.stop({ graceful: false }),
    };
  },

  async worker(url, { mode }, onJob) {
    const work = WORK[mode];
    const boss = await open(url, { max: work.localConcurrency + 3 });
    await boss.work(QUEUE, { ...work, pollingIntervalSeconds: 0.5 }, async (jobs) => {
      const pending = jobs.map((job) => onJob(job.data.n));
      if (pending[0]) await Promise.all(pending);
    });
    return { stop: () => boss.stop({ graceful: true, timeout: 3000 }) };
  },

  remaining: (url) =>
    count(
      url,
      `SELECT count(*) FROM pgboss.job WHERE name = '${QUEUE}' AND state < 'completed' AND start_after <= now()`,
    ),
};
