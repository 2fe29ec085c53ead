import { Logger, makeWorkerUtils, run } from 'graphile-worker';
import pg from 'pg';
import { count, inAYear } from './count.mjs';

const silent = new Logger(() => () => undefined);
const TASK = 'bench';

/** Its performance page's configuration, with more of it: 100 jobs and a local queue of 1 000 were faster in our trials than 24 and 500. */
const PRESETS = {
  throughput: { concurrentJobs: 100, localQueue: { size: 1000, refetchDelay: { durationMs: 10 } } },
  async: { concurrentJobs: 200, localQueue: { size: 1000, refetchDelay: { durationMs: 10 } } },
  large: { concurrentJobs: 100, localQueue: { size: 200, refetchDelay: { durationMs: 10 } } },
  latency: { concurrentJobs: 100, localQueue: { size: 1000, refetchDelay: { durationMs: 10 } } },
};

export const adapter = {
  about: {
    title: 'graphile-worker',
    package: 'graphile-worker',
    settings: [
      'concurrentJobs 100 (200 for work5), localQueue { size 1000 (200 for payload100k), refetchDelay 10 ms }, completeJobBatchDelay 0, failJobBatchDelay 0',
      'added by addJob and addJobs over a pool of as many connections as callers',
    ],
    contract: [
      'A job is deleted when it has succeeded: no history.',
      'Completion names the worker, but its id is not renewed or fenced: a lock is only given up after 4 hours.',
    ],
    recovery: {
      seconds: 4 * 3600,
      source: "its statement resets locks older than 4 hours (sql/resetLockedAt: interval '4 hours')",
    },
  },

  async setup(url) {
    const utils = await makeWorkerUtils({ connectionString: url, logger: silent });
    await utils.migrate();
    await utils.release();
  },

  async producer(url, callers) {
    const pgPool = new pg.Pool({ connectionString: url, max: callers });
    const utils = await makeWorkerUtils({ pgPool, logger: silent });
    const add = (identifier, payloads, more) =>
      utils.addJobs(payloads.map((payload) => ({ identifier, payload, ...more })));
    return {
      one: (payload) => utils.addJob(TASK, payload),
      bulk: (payloads) => add(TASK, payloads),
      head: (kind, payloads) =>
        kind === 'unhandled' ? add('nobody', payloads) : add(TASK, payloads, { runAt: inAYear() }),
      close: async () => {
        await utils.release();
        await pgPool.end();
      },
    };
  },

  async worker(url, { mode }, onJob) {
    const preset = PRESETS[mode];
    const runner = await run({
      preset: {
        worker: {
          connectionString: url,
          maxPoolSize: preset.concurrentJobs + 1,
          completeJobBatchDelay: 0,
          failJobBatchDelay: 0,
          ...preset,
        },
      },
      noHandleSignals: true,
      logger: silent,
      taskList: {
        [TASK]: async (payload) => {
          const pending = onJob(payload.n);
          if (pending) await pending;
        },
      },
    });
    return { stop: () => runner.stop() };
  },

  remaining: (url) =>
    count(
      url,
      `SELECT count(*) FROM graphile_worker._private_jobs j JOIN graphile_worker._private_tasks t ON t.id = j.task_id
       WHERE t.identifier = '${TASK}' AND j.run_at <= now()`,
    ),
};
