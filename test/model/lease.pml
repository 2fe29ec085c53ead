/*
 * The lease protocol, for Spin. Names are those of the code. What a statement or transaction of the database does at once is one step here;
 * everything else interleaves. See README.md for what is left out, laws.ts for the properties and for the BROKEN_ variants, each of which takes
 * one rule away.
 *
 * Time is no number: the clock may let a lease expire or a deadline pass whenever the protocol has to cope with it. Tokens and worker ids are
 * only ever compared for equality, so one that nobody refers to any more stands for all that are new.
 */

/* Bounds; the scenarios of laws.ts set them. */
#ifndef JOBS
#define JOBS 1
#endif
#ifndef FAULTS        /* crashes and freezes of processes, together */
#define FAULTS 0
#endif
#ifndef CUTS          /* beat sessions that are lost while the process lives */
#define CUTS 0
#endif
#ifndef LATE          /* leases that expire although the process beats: a beat that comes late */
#define LATE 0
#endif
#ifndef LOST          /* replies that are lost, of a claim or a settle, applied or not */
#define LOST 0
#endif
#ifndef DRAINS
#define DRAINS 0
#endif
#ifndef REQUESTS      /* of users, to cancel */
#define REQUESTS 0
#endif
#ifndef HANGS         /* handlers that never return, and do not care for their abort */
#define HANGS 0
#endif
#ifndef DEADLINES     /* 0: 'off' */
#define DEADLINES 0
#endif
#ifndef FAILS         /* 1: handlers may report errors */
#define FAILS 0
#endif
#ifndef EFFECTS       /* 1: handlers may complete in lease.transaction() */
#define EFFECTS 0
#endif
#ifndef BAD           /* outcomes that the database refuses for their content */
#define BAD 0
#endif
#ifndef HINTS         /* wake-ups that are lost */
#define HINTS 0
#endif
#ifndef POISON        /* 1: job 0 kills the process that runs it */
#define POISON 0
#endif
#ifndef LEADERS       /* 0: every process believes that it leads, all the time. 1: with the lock, and the stamp that goes stale */
#define LEADERS 0
#endif
#ifndef RESTARTS      /* 1: a supervisor starts what has ended */
#define RESTARTS 0
#endif
#define MAX_ATTEMPTS 2
#define MAX_CRASHES 2
#define MAX_RELEASES 1

/* Two processes, 0 with two slots and 1 with one: enough for a worker to claim its own rescued job while the stale run lives. */
#define SLOTS 3
#define HOST(s) ((s) / 2)
#define NOBODY 9

/* Which property is checked: one by itself for a variant, so that no other can answer for it. */
#define ALL 0
#define ONCE 1
#define FENCED 2
#define ANSWERED 3
#define DESERVED 4
#define JUDGED 5
#define PLACED 6
#define STOPPED_FOR_GOOD 7
#define EFFECTIVE 8
#define INNOCENT 9
#define CONVICTED 10
#define NEVER 11
#ifndef PROPERTY
#define PROPERTY ALL
#endif
#define CHECKED(property) (PROPERTY == ALL || PROPERTY == property)

/* A state that must be reachable, else the properties would hold of nothing. */
#define ZOMBIE_REFUSED 1
#define REPLY_REPEATED 2
#define DRAINED_THEN_DONE 3
#define DEADLINE_WHILE_BEATING 4
#define TWO_RESCUERS 5
#define OWN_JOB_AGAIN 6
#define LATE_LEASE 7
#define UNKNOWN_GIVEN_BACK 8
#define FENCED_ITSELF 9
#define POISON_CONVICTED 10
#define NEIGHBOUR_DONE 11
#define UNLUCKY_CONVICTED 12
#define OLD_LEADER_TAKES 13
#define STANDIN_TAKES 14
#define CANCEL_TOO_LATE 15
#define CANCEL_SURVIVES 16
#define DRAIN_KILLED 17
#define BAD_OUTCOME_FAILED 18
#define NOT_ITS_OWN_RECORD 19
#ifndef REACH
#define REACH 0
#endif
hidden bit reached;
#define REACHED(what, when) reached = (REACH == what && (when)); assert(!reached)

/* The properties, by the names under which the checker reports them. */
hidden bit once, fenced, answered, deserved, judged, placed, stopped, effective, innocent, convicted, bounds;

/* ---- The database ---- */

/* Tables, as a set: what a job is in is no single value, so that a job in none or in two can be seen. */
#define READY 1
#define WAITING 2
#define LEASES 4
#define FINISHED 8
byte at[JOBS];
byte attempt[JOBS], crashes[JOBS], releases[JOBS];
#define SUSPECT(j) (crashes[j] + 1 >= MAX_CRASHES)

/* The row of leases. */
byte token[JOBS], holder[JOBS];
bit overdue[JOBS], late[JOBS], cancel_requested[JOBS];

/* What an outcome or a rescue says of a lease: the events of move_v1. */
#define COMPLETE 1
#define FAIL 2
#define FATAL 3
#define STOPPED 4
#define RELEASE 5
#define RETURN 6
#define GIVEBACK 7
#define CRASH 8
#define LOSTDRAIN 9
#define DEADLINE 10
#define REVOKE 11

/* What runs or finished record under a token. */
#define COMPLETED 1
#define FAILED 2
#define CANCELLED 3
#define RELEASED 4
#define DEAD 5
#define TOKENS 7
byte record[TOKENS + 1];
/* For the properties: accepted outcomes of a token, acknowledged requests, effects in the database. */
byte outcomes[TOKENS + 1];
bit acknowledged[JOBS];
byte effects[JOBS];

/* Rows of workers. */
#define GONE 0
#define LIVE 1
#define DRAINING 2
#define DECLARED_DEAD 3
#define IDS 6
byte row[IDS + 1];
bit expired[IDS + 1], session[IDS + 1], drained[IDS + 1], died_by_itself[IDS + 1];
byte leases_at_death[IDS + 1];
#define BEATING(w) (row[w] == LIVE || row[w] == DRAINING)

/* The leader lock and the leader's stamp. */
byte lock_by = NOBODY;
bit stale;

/* ---- The processes ---- */

#define UP 0
#define FROZEN 1
#define DOWN 2
byte up[2];
byte me[2];                 /* its worker id; 0: not registered */
byte old[2];                /* an id that it has lost, not retired yet */
bit draining[2], leads[2];

/* One run in a slot: the claim, the handler, the outcome until it is answered. */
#define IDLE 0
#define ASKED 1             /* the claim has looked at the worker's row, and has not taken yet */
#define UNHEARD 2           /* the same, and the process that asked is gone */
#define WIRE 3              /* leased, the reply is on its way */
#define RUNNING 4
#define HUNG 5
#define ENDED 6             /* its outcome is to be written */
#define LOOK 7              /* the outcome moved nothing: look for it */
#define LINGERS 8           /* the lease is given up, the handler runs on */
#define HALF_MOVED 9        /* BROKEN_MOVE only */
#define CHECKED_LEASE 10    /* BROKEN_TRANSACTION only */
#define WAITS_FOR_EVER 11   /* BROKEN_WAIT only */
byte phase[SLOTS], rj[SLOTS], rt[SLOTS], rw[SLOTS], outcome[SLOTS];
bit suspects[SLOTS];        /* it asks for a suspect, or runs one */
bit aborted[SLOTS], repeat[SLOTS], bad[SLOTS], lingering[SLOTS];
bit own[SLOTS];             /* for the properties: an outcome that this run sent was applied */

/* What a rescuer has read and is about to take; whom it has seen without a session, and whether there was no beat since. */
byte cj[2], ct[2], cevent[2];
bit calone[2];
byte suspected[2];
bit silent[2];
byte edge[2];               /* BROKEN_EDGE only: whom it has declared dead just now */
/* A forced cancel between its look and its move. */
byte uj, ut;

byte faults = FAULTS, cuts = CUTS, lates = LATE, lost = LOST, drains = DRAINS, requests = REQUESTS, hangs = HANGS, bads = BAD;
#if HINTS
byte hints = HINTS;
bit asleep[2];              /* nobody has told it that there is work */
#endif

#define IS_POISON(j) (POISON && (j) == 0)
#define OTHER(j) (JOBS - 1 - (j))
#define IS(j, table) ((j) < JOBS && at[j] == table)
#define ORDINARY(j) (at[j] == READY && !SUSPECT(j))
#define LONELY(j) (at[j] == READY && SUSPECT(j))
#define ANY(what) (what(0) || what(OTHER(0)))
#define HAS_LEASE(w) ((at[0] == LEASES && holder[0] == w) || (at[OTHER(0)] == LEASES && holder[OTHER(0)] == w))
#define RUNS_SUSPECT(w) ((at[0] == LEASES && holder[0] == w && SUSPECT(0)) || (at[OTHER(0)] == LEASES && holder[OTHER(0)] == w && SUSPECT(OTHER(0))))
#define ENDED_ALL (at[0] == FINISHED && at[OTHER(0)] == FINISHED)
#define FREE(s) (phase[s] == IDLE || phase[s] == UNHEARD)
#define EMPTY(p) (p == 0 -> FREE(0) && FREE(1) : FREE(2))
#define HOLDS_SUSPECT(p) (p == 0 -> suspects[0] || suspects[1] : suspects[2])
#define KNOWS(p, t) (p == 0 -> rt[0] == t || rt[1] == t : rt[2] == t)

#define TOKEN_USED(t) (token[0] == t || token[OTHER(0)] == t || rt[0] == t || rt[1] == t || rt[2] == t || ct[0] == t || ct[1] == t || ut == t)
#define ID_USED(w) (me[0] == w || me[1] == w || old[0] == w || old[1] == w || holder[0] == w || holder[OTHER(0)] == w || \
  rw[0] == w || rw[1] == w || rw[2] == w || suspected[0] == w || suspected[1] == w || edge[0] == w || edge[1] == w)

hidden byte i, j, w, t, event_is, n;
hidden bit alone_is, hit, applied, spent;

/* ---- Parts of steps. Each is used inside one only. ---- */

/* What nobody refers to any more is forgotten, so that its number can stand for a new one. */
inline tidy() {
  for (i : 1 .. TOKENS) {
    if
    :: (record[i] != 0 || outcomes[i] != 0) && !TOKEN_USED(i) -> record[i] = 0; outcomes[i] = 0
    :: else
    fi
  }
  for (i : 1 .. IDS) {
    if
    :: row[i] != GONE && !ID_USED(i) ->
      row[i] = GONE; expired[i] = 0; session[i] = 0; drained[i] = 0; died_by_itself[i] = 0; leases_at_death[i] = 0
    :: else
    fi
  }
  i = 0
}

inline one_place(job) {
  if
  :: CHECKED(PLACED) -> placed = (at[job] == READY || at[job] == WAITING || at[job] == LEASES || at[job] == FINISHED); assert(placed)
  :: else
  fi
}

inline free_slot(s) {
  phase[s] = IDLE; rj[s] = 0; rt[s] = 0; rw[s] = 0; outcome[s] = 0; suspects[s] = 0; aborted[s] = 0; repeat[s] = 0; bad[s] = 0;
  lingering[s] = 0; own[s] = 0
}

/* A hint that there is work. What is lost of it, the poll finds. */
inline wake_up() {
#if HINTS
  asleep[0] = 0; asleep[1] = 0;
#endif
  skip
}

/*
 * move_v1 for one job whose lease is locked, and step_v1 for one that completes: out of leases, into where the event, the budgets and the
 * requests send it. `under`: the token that whoever moves it names.
 */
inline move(job, under, event, alone) {
  if
  :: CHECKED(ONCE) -> once = (outcomes[under] == 0); assert(once)
  :: else
  fi;
  if
  :: CHECKED(FENCED) -> fenced = (at[job] == LEASES && token[job] == under); assert(fenced)
  :: else
  fi;
  outcomes[under] = outcomes[under] + (outcomes[under] < 2 -> 1 : 0);
  record[under] = (event == COMPLETE -> COMPLETED :
    (event == FAIL || event == FATAL -> FAILED :
    ((event == STOPPED && cancel_requested[job]) || event == REVOKE -> CANCELLED :
    (event == CRASH || event == LOSTDRAIN || event == DEADLINE -> DEAD :
    (event == GIVEBACK -> record[under] : RELEASED)))));
  spent = (event == FATAL) || ((event == FAIL || event == DEADLINE) && attempt[job] + 1 >= MAX_ATTEMPTS) ||
#ifdef BROKEN_ALONE
    (event == CRASH && SUSPECT(job)) ||
#else
    (event == CRASH && SUSPECT(job) && alone) ||
#endif
    ((event == RELEASE || event == LOSTDRAIN) && releases[job] >= MAX_RELEASES);
  if
  :: event == FAIL || event == DEADLINE -> attempt[job] = (spent -> attempt[job] : attempt[job] + 1)
  :: else
  fi;
  if
  :: event == CRASH && !spent -> crashes[job] = (crashes[job] + 1 >= MAX_CRASHES -> crashes[job] : crashes[job] + 1)
  :: event == RELEASE || event == LOSTDRAIN -> releases[job] = (spent -> releases[job] : releases[job] + 1)
  :: event == COMPLETE || event == FAIL || event == FATAL || event == STOPPED -> crashes[job] = 0
  :: else
  fi;
  if
  :: event == CRASH && spent ->
    REACHED(POISON_CONVICTED, IS_POISON(job));
    REACHED(UNLUCKY_CONVICTED, !IS_POISON(job));
    if
    :: CHECKED(INNOCENT) && POISON -> innocent = IS_POISON(job); assert(innocent)
    :: else
    fi
  :: else
  fi;
  REACHED(DRAINED_THEN_DONE, event == COMPLETE && releases[job] > 0);
  REACHED(NEIGHBOUR_DONE, event == COMPLETE && POISON && SUSPECT(job));
  REACHED(CANCEL_TOO_LATE, event == COMPLETE && cancel_requested[job]);
  REACHED(CANCEL_SURVIVES, event == CRASH && cancel_requested[job]);
  REACHED(DRAIN_KILLED, event == LOSTDRAIN);
  REACHED(BAD_OUTCOME_FAILED, event == FATAL);
  REACHED(LATE_LEASE, event == RETURN && late[job]);
  if
  :: event == COMPLETE -> at[job] = FINISHED
#ifdef BROKEN_CANCEL
  :: event != COMPLETE && ((cancel_requested[job] && event != CRASH) || event == REVOKE) -> at[job] = FINISHED
  :: event != COMPLETE && !((cancel_requested[job] && event != CRASH) || event == REVOKE) ->
#else
  :: event != COMPLETE && (cancel_requested[job] || event == REVOKE) -> at[job] = FINISHED
  :: event != COMPLETE && !(cancel_requested[job] || event == REVOKE) ->
#endif
    if
    :: spent ->
      at[job] = FINISHED;
      if
      :: CHECKED(CONVICTED) && POISON -> convicted = (!IS_POISON(job) || event == CRASH); assert(convicted)
      :: else
      fi
    :: !spent && (event == FAIL || event == DEADLINE) -> at[job] = WAITING
    :: else -> at[job] = READY
    fi
  fi;
  if
  :: CHECKED(CONVICTED) -> convicted = !(IS_POISON(job) && event == COMPLETE); assert(convicted)
  :: else
  fi;
  token[job] = 0; holder[job] = 0; overdue[job] = 0; late[job] = 0; cancel_requested[job] = 0;
  if
  /* What no later step reads must not tell states apart. */
  :: at[job] == FINISHED -> attempt[job] = 0; crashes[job] = 0; releases[job] = 0
  :: else
  fi;
  one_place(job);
  wake_up()
}

/* The process is gone, with all that it knew. The server notices at once; a host that vanishes silently is a freeze without a thaw. */
inline crash(p) {
  up[p] = DOWN;
  if
  :: me[p] != 0 -> session[me[p]] = 0
  :: else
  fi;
  me[p] = 0; old[p] = 0; draining[p] = 0; leads[p] = 0;
  if
  :: lock_by == p -> lock_by = NOBODY
  :: else
  fi;
  for (n : 0 .. SLOTS - 1) {
    if
    :: HOST(n) == p && (phase[n] == ASKED || phase[n] == UNHEARD) -> phase[n] = UNHEARD; suspects[n] = 0
    :: HOST(n) == p && phase[n] != ASKED && phase[n] != UNHEARD -> free_slot(n)
    :: else
    fi
  }
  n = 0;
  cj[p] = 0; ct[p] = 0; cevent[p] = 0; calone[p] = 0; suspected[p] = 0; silent[p] = 0; edge[p] = 0;
  tidy()
}

/* The identity is lost: its jobs are aborted and nothing is claimed until there is another. Handlers that do not care run on. */
inline fence(p) {
  for (n : 0 .. SLOTS - 1) {
    if
    :: HOST(n) == p && phase[n] >= WIRE -> aborted[n] = 1
    :: else
    fi
  }
  n = 0;
  session[me[p]] = 0; old[p] = me[p]; me[p] = 0
}

inline declare_dead(id) {
  row[id] = DECLARED_DEAD;
  leases_at_death[id] = (at[0] == LEASES && holder[0] == id -> 1 : 0) + (JOBS == 2 && at[OTHER(0)] == LEASES && holder[OTHER(0)] == id -> 1 : 0)
}

/* The run has its answer. */
inline told(s, as_applied) {
  if
  :: CHECKED(ANSWERED) -> answered = (outcome[s] == GIVEBACK || as_applied == own[s]); assert(answered)
  :: else
  fi;
  REACHED(ZOMBIE_REFUSED, !as_applied && outcome[s] == COMPLETE && record[rt[s]] == DEAD);
  REACHED(REPLY_REPEATED, as_applied && repeat[s] && outcome[s] == COMPLETE);
  if
  :: lingering[s] || phase[s] == HUNG -> phase[s] = LINGERS; rt[s] = 0; rw[s] = 0; outcome[s] = 0; repeat[s] = 0; own[s] = 0; aborted[s] = 0
  :: else -> free_slot(s)
  fi;
  tidy()
}

/* The fence of every write. */
#ifdef BROKEN_FENCE
#define HELD(s) (at[rj[s]] == LEASES && holder[rj[s]] == rw[s])
#else
#define HELD(s) (at[rj[s]] == LEASES && holder[rj[s]] == rw[s] && token[rj[s]] == rt[s])
#endif
