import { LaneMarks, type Look, type Seen } from '@leasehold/nestjs/dist/claim/lane-marks';
import { parseClaim } from '@leasehold/nestjs/dist/claim/leased-job';
import { claimValues, readScan } from '@leasehold/nestjs/dist/claim/step-values';
import { RowGate, type TestDatabase, createTestDatabase, eventually, startLeaseApp } from './support';

const S = '"leasehold"';
const LANE = ['default', 'a'] as const;

/** A claim from sending to answer: what it took, and the transactions that it saw. */
function claimed(
  marks: LaneMarks,
  look: Look,
  positions: number[],
  seen: Partial<Seen> & { priority?: number } = {},
): void {
  const { priority = 0, ...given } = seen;
  marks.saw({
    lanes: [LANE],
    ranges: marks.ranges([LANE], look),
    jobs: positions.map(() => ({ queue: 'default', kind: 'a', priority })),
    positions,
    exhausted: [true],
    xmin: 0,
    xid: 0,
    us: 0,
    ...given,
  });
}

/** Per mark [priority, position] to look after; and the gaps between priorities, as one text. */
const rangesOf = (marks: LaneMarks, look: Look): [number, number][] => {
  const { fromPriorities, toPriorities, fromPositions, toPositions } = marks.ranges([LANE], look);
  const known: [number, number][] = [];
  let gaps = '';
  fromPriorities.forEach((from, i) => {
    if (from !== toPriorities[i]) gaps += `${from}<${toPriorities[i]} `;
    // What was given back lies below zero, and is always looked at.
    else if (toPositions[i] === '0') expect(fromPositions[i]).toBe('-9223372036854775808');
    else known.push([from, Number(fromPositions[i])]);
  });
  const bounds = [-32_769, ...known.map(([priority]) => priority), 32_768];
  expect(gaps).toBe(
    bounds
      .slice(1)
      .map((to, i) => `${bounds[i]}<${to} `)
      .join(''),
  );
  return known;
};

describe('the low-water marks of a lane', () => {
  it('at first nothing is known; then a claim begins after what was taken, and before it only at what may come up there', () => {
    const marks = new LaneMarks();
    expect(rangesOf(marks, 'fast')).toEqual([]);
    claimed(marks, 'full', [7, 9, 8]);
    // More urgent priorities, and what was given back (below zero), are looked at from their start.
    expect(rangesOf(marks, 'fast')).toEqual([[0, 9]]);
    claimed(marks, 'fast', [11], { priority: -5 });
    expect(rangesOf(marks, 'fast')).toEqual([
      [-5, 11],
      [0, 9],
    ]);
    expect(rangesOf(marks, 'full')).toEqual([]);
  });

  it('the safe one waits until every transaction has ended that may have begun before the answer', () => {
    const marks = new LaneMarks();
    const safe = () => rangesOf(marks, 'safe').at(-1)![1];
    claimed(marks, 'full', [5, 6], { xid: 120 });
    // Its own number is no bound: a settle in the same transaction may have had it long before.
    claimed(marks, 'safe', [7, 8], { xmin: 125, xid: 130 });
    expect(safe()).toBe(0);
    claimed(marks, 'safe', [9], { xmin: 129, xid: 140 });
    expect(safe()).toBe(0);
    claimed(marks, 'safe', [10], { xmin: 130, xid: 150 });
    expect(safe()).toBe(6);
    // A straggler came up: what lies before it is settled, it is not.
    claimed(marks, 'safe', [7, 11], { xmin: 145, xid: 160 });
    expect(safe()).toBe(6);
    claimed(marks, 'safe', [], { xmin: 200 });
    expect(safe()).toBe(10);
  });

  it('a claim that was on the wire already bounds nothing', () => {
    const marks = new LaneMarks();
    claimed(marks, 'full', []);
    const sentBefore = marks.ranges([LANE], 'safe');
    claimed(marks, 'safe', [5]);
    claimed(marks, 'safe', [], { ranges: sentBefore, xid: 50 });
    claimed(marks, 'safe', [], { xmin: 100 });
    expect(rangesOf(marks, 'safe').at(-1)![1]).toBe(0);
  });

  it('a look that began after the safe mark, or was cut short, settles nothing', () => {
    const marks = new LaneMarks();
    claimed(marks, 'full', [5]);
    claimed(marks, 'fast', [6], { xmin: 9, xid: 9 });
    claimed(marks, 'fast', [], { xmin: 9 });
    claimed(marks, 'safe', [], { xmin: 9, exhausted: [false] });
    expect(rangesOf(marks, 'safe').at(-1)).toEqual([0, 0]);
    expect(rangesOf(marks, 'fast').at(-1)).toEqual([0, 6]);
  });

  it('looks further back as often as their cost allows: twenty times what they took, in each lane one from the start at most every second', () => {
    let now = 5000;
    const marks = new LaneMarks(() => now);
    const look = (): Look => marks.ranges([LANE]).looks[0]!;
    expect(look()).toBe('full');
    claimed(marks, 'full', [], { us: 400 });
    expect(look()).toBe('safe');
    claimed(marks, 'safe', [], { us: 400 });
    expect(look()).toBe('safe');
    claimed(marks, 'safe', [], { us: 10_500 }); // 10 ms more than usual
    expect(look()).toBe('fast');
    expect(marks.ranges([['other', 'a'], LANE]).looks).toEqual(['full', 'fast']);
    now += 199;
    expect(look()).toBe('fast');
    now += 1;
    expect(look()).toBe('safe');
    now += 800;
    expect(look()).toBe('full');
    claimed(marks, 'full', [], { us: 500_500 });
    now += 9999;
    expect(look()).not.toBe('full');
    now += 1;
    expect(look()).toBe('full');
    // One that ran into the statement's limit is not repeated at once either.
    marks.gaveUp([LANE], marks.ranges([LANE]), 2_000_500);
    now += 39_999;
    expect(look()).not.toBe('full');
  });

  it('keeps a bounded number of marks, those in use', () => {
    const marks = new LaneMarks();
    claimed(marks, 'full', []);
    for (let priority = 0; priority < 100; priority++) claimed(marks, 'fast', [priority + 1], { priority });
    expect(rangesOf(marks, 'fast').map(([priority]) => priority)).toEqual(Array.from({ length: 16 }, (_, i) => 84 + i));
  });
});

describe('claims that begin at a mark', () => {
  let db: TestDatabase;
  let marks: LaneMarks;
  const enqueue = `SELECT ${S}.enqueue_v1($1) AS ids`;
  const group = (count: number, priority = 0): string =>
    JSON.stringify([
      {
        queue: 'default',
        kind: 'a',
        priority,
        maxAttempts: 1,
        maxCrashes: 3,
        maxReleases: 3,
        payloads: Array.from({ length: count }, (_, i) => i),
      },
    ]);

  const SETTLES = "'{}', '{}'";

  /** Claims through step_v1 as the exchange does. @returns the ids */
  async function claim(look: Look, want = 5, settles = SETTLES): Promise<string[]> {
    const ranges = marks.ranges([LANE], look);
    const request = { workerId: 'w', want, lanes: [LANE], limits: [want], suspects: 0 } as const;
    const { jobs: text, scan } = await db.one<{ jobs: string | null; scan: string }>(
      `SELECT jobs, scan FROM ${S}.step_v1('w', ${settles}, null, 1, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)`,
      claimValues({ ...request, lanes: [...request.lanes], limits: [...request.limits] }, ranges, 1_000_000),
    );
    const { jobs, positions } = parseClaim(text, 'w', 0);
    const {
      fleet: _fleet,
      empty: _empty,
      ...read
    } = readScan(scan, { ...request, lanes: [...request.lanes], limits: [...request.limits] }, jobs);
    marks.saw({ lanes: [LANE], ranges, jobs, positions, ...read });
    return jobs.map(({ id }) => id);
  }

  beforeAll(async () => {
    db = await createTestDatabase({ name: 'lane-marks' });
    await startLeaseApp(db, { options: { role: 'producer' } });
    await db.query(
      `INSERT INTO ${S}.workers (id, name, host, pid, version, state, kinds, concurrency, ttl_ms, incarnation, expires_at)
       VALUES ('w', 'w', 'h', 1, '0', 'live', '{a}', 1, 1, '', clock_timestamp() + interval '1 day')`,
    );
  });
  beforeEach(async () => {
    marks = new LaneMarks();
    await db.query(`DELETE FROM ${S}.ready`);
    await claim('full');
  });
  afterAll(() => db.drop());

  it('a straggler (position taken early, committed late) is claimed by the next look, however far others have got', async () => {
    const late = await RowGate.hold(db, enqueue, [group(1)]);
    const straggler = late.rows[0]!.ids;
    await db.query(enqueue, [group(40)]);
    for (let i = 0; i < 6; i++) expect(await claim('safe')).toHaveLength(5);
    await late.release();
    // The naive mark, which is where the last claim ended, has left it behind.
    expect(await claim('fast')).not.toContain(straggler);
    expect(await claim('safe')).toContain(straggler);
  });

  it('so is one that commits while the marks have long moved on past it', async () => {
    await db.query(enqueue, [group(10)]);
    for (let i = 0; i < 3; i++) await claim('safe');
    const late = await RowGate.hold(db, enqueue, [group(1)]);
    const straggler = late.rows[0]!.ids;
    for (let i = 0; i < 5; i++) {
      await db.query(enqueue, [group(5)]);
      await claim('safe');
    }
    await late.release();
    expect(await claim('safe')).toContain(straggler);
  });

  it('so is one whose transaction began between a claim’s settle and its choice', async () => {
    await db.query(enqueue, [group(2)]);
    const ids = await claim('full', 2);
    const { tokens } = await db.one<{ tokens: string[] }>(
      `SELECT array_agg(token ORDER BY job_id)::text[] AS tokens FROM ${S}.leases WHERE job_id = ANY ($1::bigint[])`,
      [ids],
    );
    // The settle has the transaction's number, and waits at its second lease.
    const gate = await RowGate.hold(db, `SELECT FROM ${S}.leases WHERE job_id = $1 FOR UPDATE`, [ids[1]]);
    const waiting = claim('safe', 5, `'{${ids.join(',')}}', '{${tokens.join(',')}}'`);
    await gate.untilWaiting();
    const late = await RowGate.hold(db, enqueue, [group(1)]);
    await db.query(enqueue, [group(1)]);
    await gate.release();
    expect(await waiting).toHaveLength(1);
    for (let i = 0; i < 3; i++) expect(await claim('safe')).toEqual([]);
    await late.release();
    expect(await claim('safe')).toEqual([late.rows[0]!.ids]);
  });

  it('rows that a rival had locked and let go again are not left behind', async () => {
    await db.query(enqueue, [group(20)]);
    const rival = await RowGate.hold(
      db,
      `SELECT job_id::text FROM ${S}.ready ORDER BY position LIMIT 5 FOR UPDATE SKIP LOCKED`,
    );
    for (let i = 0; i < 3; i++) expect(await claim('safe')).toHaveLength(5);
    await rival.rollback();
    expect(await claim('safe')).toEqual(rival.rows.map((row) => row.job_id));
  });

  it('what was given back and what is more urgent comes first, in any look', async () => {
    await db.query(enqueue, [group(10)]);
    await claim('safe');
    await claim('fast', 1);
    await db.query(
      `UPDATE ${S}.ready SET position = position - 4611686018427387904 WHERE job_id = (SELECT max(job_id) FROM ${S}.ready)`,
    );
    const { last } = await db.one<{ last: string }>(`SELECT max(job_id)::text AS last FROM ${S}.ready`);
    const { ids } = await db.one<{ ids: string }>(enqueue, [group(1, -7)]);
    expect(await claim('fast', 2)).toEqual([ids, last]);
  });

  it('the safe mark follows, and a claim no longer walks over what an old snapshot keeps from being cleaned', async () => {
    const snapshot = await db.client();
    await snapshot.query('BEGIN ISOLATION LEVEL REPEATABLE READ');
    await snapshot.query('SELECT 1');
    const client = await db.client();
    const cost = async (look: Look): Promise<number> => {
      const { fromPriorities, toPriorities, fromPositions, toPositions } = marks.ranges([LANE], look);
      const { rows } = await client.query<{ 'QUERY PLAN': string }>(
        `EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF)
         SELECT x.* FROM unnest($1::int[], $2::int[], $3::bigint[], $4::bigint[]) AS g(f, t, a, b) CROSS JOIN LATERAL (
           SELECT * FROM (SELECT r.ctid FROM ${S}.ready r WHERE r.queue = 'default' AND r.kind = 'a' AND NOT r.suspect
             AND r.priority > g.f AND r.priority < g.t ORDER BY r.priority, r.position LIMIT 5) p
           UNION ALL
           SELECT * FROM (SELECT r.ctid FROM ${S}.ready r WHERE r.queue = 'default' AND r.kind = 'a' AND NOT r.suspect
             AND r.priority = CASE WHEN g.f = g.t THEN g.f END AND r.position > g.a AND r.position < g.b
             ORDER BY r.priority, r.position LIMIT 5) q) x`,
        [fromPriorities, toPriorities, fromPositions, toPositions],
      );
      const plan = rows.map((row) => row['QUERY PLAN']).join('\n');
      return Number(/Buffers: shared hit=(\d+)/.exec(plan)?.[1]);
    };
    await client.query('SET enable_seqscan = off');
    await client.query('SET enable_bitmapscan = off');
    await db.query(enqueue, [group(10_000)]);
    for (let i = 0; i < 18; i++) await claim('safe', 500);
    const far = await cost('full');
    // Pages: 9000 dead rows lie before the first live one.
    expect(far).toBeGreaterThan(80);
    // As soon as whatever else ran on the server has ended, the mark leaves the last claims' only.
    await eventually(
      async () => {
        await claim('safe', 5);
        return (await cost('safe')) < far / 3;
      },
      { state: () => [far, rangesOf(marks, 'safe')] },
    );
    await snapshot.query('ROLLBACK');
    await Promise.all([snapshot.end(), client.end()]);
  });
});
