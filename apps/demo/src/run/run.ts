import { once } from 'node:events';
import { setTimeout as sleep } from 'node:timers/promises';
import { startApi } from '../api/start-api';
import { findDocuments } from '../documents/find-folder';
import type { IndexTotals } from '../documents/close-index.handler';
import { IndexDocument } from '../documents/index-document.handler';
import { DemoError, UsageError } from '../errors';
import type { FaultContext } from '../faults/context';
import { freezeWorker } from '../faults/freeze-worker';
import { type Kill, killWorker } from '../faults/kill-worker';
import { TTL_MS } from '../lease-settings';
import type { DemoOptions } from '../options';
import { plural, printable, seconds } from '../output/format';
import { Timeline } from '../output/timeline';
import { prepareReportFolder, writeReport } from '../output/write-report';
import { Cleanup } from './cleanup';
import { openDatabase } from './database';
import { Fleet } from './fleet';
import { paceFor } from './pacing';
import { Progress } from './progress';
import { until } from './until';
import { checkBatch } from './check-batch';
import { verify } from './verify';

/** By its kind: this process has no handlers. */
const CLOSING = { handler: 'document.close-index', queue: 'index', maxCrashes: 6 };
const ENQUEUE_AT_ONCE = 5000;
const MAX_REPLACEMENTS = 3;
/** How long the jobs run undisturbed before the first fault. */
const CALM_MS = 1000;

/** One demonstration, from the walk to the report. @returns the exit code */
export async function run(options: DemoOptions, signal: AbortSignal): Promise<number> {
  const timeline = new Timeline(options.json ? process.stderr : process.stdout, options.json);
  const cleanup = new Cleanup();
  try {
    return await runWith(options, signal, timeline, cleanup);
  } finally {
    timeline.stopProgress();
    await cleanup.run();
  }
}

async function runWith(
  options: DemoOptions,
  signal: AbortSignal,
  timeline: Timeline,
  cleanup: Cleanup,
): Promise<number> {
  const databaseUrl = process.env.DATABASE_URL || undefined;
  if (databaseUrl !== undefined && options.data !== undefined) {
    throw new UsageError('--data is for the embedded PostgreSQL, but DATABASE_URL is set: leave one of them out');
  }
  await prepareReportFolder(options.report);
  const { root, files, others, links, unreadable } = await findDocuments(options.folder, signal);
  timeline.say(`${plural(files.length, 'document')} in ${printable(root)}`);
  timeline.say(`  beside ${plural(others, 'other file')}; ${plural(links, 'symbolic link')} not followed`);
  if (unreadable.length > 0) timeline.say(`  ${plural(unreadable.length, 'folder')} cannot be read`);

  const database = await openDatabase(databaseUrl, options.data);
  cleanup.add(() => database.close());
  signal.throwIfAborted();
  timeline.say(`PostgreSQL: ${database.description}`);
  const api = await startApi(database.url, database.schema);
  cleanup.add(() => api.close());
  timeline.say(`API: ${api.url}/jobs?state=running  /jobs/counts  /workers  /leader`);

  const paceMs = options.faults ? paceFor(files.length, options.workers) : 0;
  if (options.faults) sayPace(timeline, paceMs);
  let giveUp: (error: Error) => void = () => undefined;
  const lost = new Promise<never>((_, reject) => (giveUp = reject));
  lost.catch(() => undefined);
  let replacements = 0;
  const fleet = new Fleet({ url: database.url, schema: database.schema, paceMs }, (worker, how) => {
    timeline.tell(`${worker.name} has ended unexpectedly (${how})${worker.lastWords}`, 'bad');
    if (++replacements > MAX_REPLACEMENTS) giveUp(new DemoError('Workers keep ending unexpectedly'));
    else fleet.start();
  });
  cleanup.add(() => fleet.stop());
  timeline.say('');
  for (let i = 0; i < options.workers; i++) fleet.start();
  await Promise.race([until('The start of the workers', () => fleet.up.length >= options.workers, { signal }), lost]);
  timeline.tell(`${fleet.up.map(({ name, pid }) => `${name} (pid ${pid})`).join(', ')} up`);

  const fileOfJob = new Map<string, string>();
  // Open while the jobs are added, so that it cannot end before the last.
  const { id: batch } = await api.batches.create('documents', [], { open: true, onFinished: CLOSING });
  for (let at = 0; at < files.length; at += ENQUEUE_AT_ONCE) {
    const paths = files.slice(at, at + ENQUEUE_AT_ONCE);
    const { jobIds } = await api.batches.add(
      batch,
      paths.map((path) => ({ handler: IndexDocument, payload: { root, path } })),
    );
    jobIds.forEach((id, i) => fileOfJob.set(id, printable(paths[i] ?? '')));
  }
  await api.batches.seal(batch);
  timeline.tell(`${plural(files.length, 'job')} enqueued, as one batch`);
  timeline.startProgress(files.length);
  const progress = new Progress(api.jobs, api.batches, batch, files.length, timeline);
  const context: FaultContext = {
    fleet,
    jobs: api.jobs,
    database,
    timeline,
    progress,
    signal,
    fileOf: (id) => fileOfJob.get(id) ?? 'unknown',
  };
  const began = performance.now();
  const faults = options.faults ? injectFaults(context) : Promise.resolve(undefined);
  const [kill] = await Promise.race([Promise.all([faults, progress.untilDone(signal)]), lost]);
  timeline.stopProgress();
  timeline.tell(
    `done: ${plural(files.length, 'job')} ended, ${seconds(performance.now() - began)} after they were enqueued`,
    'good',
  );
  const closing = await api.jobs.get(await progress.untilClosed(signal));
  timeline.tell('the batch has ended, and its closing job has read every result', 'good');
  await fleet.stop();
  timeline.tell('the workers have drained and signed off');

  const { summary, checks } = await verify(database, files.length, fleet.refusedWrites, kill);
  const ended = await api.batches.get(batch);
  const { paths, findings } = await writeReport(database, options.report, root, summary, checks, (found) =>
    checkBatch(ended, closing.result as IndexTotals | null, found),
  );
  timeline.say('');
  for (const { ok, text } of checks) timeline.say(`  ${ok ? '✓' : '✗ NOT OK:'} ${text}`);
  timeline.say(
    `  ${plural(findings.totals.words, 'word')}, ${plural(findings.totals.links, 'link')}, ` +
      `${plural(findings.totals.brokenLinks, 'broken relative link')}: see ${paths.join(' and ')}`,
  );
  if (options.json) process.stdout.write(`${JSON.stringify(summary)}\n`);
  if (options.serve) {
    timeline.say(`\nThe API stays up until Ctrl-C: ${api.url}/jobs`);
    if (!signal.aborted) await once(signal, 'abort');
  }
  return checks.every(({ ok }) => ok) ? 0 : 1;
}

function sayPace(timeline: Timeline, paceMs: number): void {
  timeline.say(`Every job is held up for ${paceMs} ms until both faults are over, so that they find jobs in flight.`);
  timeline.say(
    `Leases last ${TTL_MS / 1000} s here. With the default 30 s TTL a killed worker is noticed within 5 s all the same, for its session ` +
      'is gone; a frozen one after about 30 s.',
  );
}

/** @returns whom it killed */
async function injectFaults(context: FaultContext): Promise<Kill | undefined> {
  const { fleet, timeline, signal } = context;
  await sleep(CALM_MS, undefined, { signal });
  const kill = await killWorker(context);
  await freezeWorker(context);
  fleet.setPace(0);
  if (!context.progress.done) timeline.tell('both faults are over: the rest runs at full speed');
  return kill;
}
